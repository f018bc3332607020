"""Loading, unloading and asking a tritonserver about its models, over gRPC.

gRPC because a load through HTTP blocks the worker thread it came in on, and with it every request that shares the
thread, for as long as the load takes (measured: 2 s).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from enginehouse_contract.errors import EngineUnavailableError, PromotionError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_ASK_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
_NOT_THERE: Final = ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says of one model."""

    state: str  # READY, LOADING, UNLOADING, UNAVAILABLE; empty: never loaded
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return self.state == "READY"

    @property
    def holds_memory(self) -> bool:
        """Whether it is loaded, or on its way in or out."""
        return self.state in {"READY", "LOADING", "UNLOADING"}


class TritonAdministration:
    """One server's administration; a context manager that closes the connection."""

    def __init__(self, grpc_url: str, *, load_timeout_s: float = 600.0) -> None:
        self._url = grpc_url
        self._load_timeout_s = load_timeout_s
        self._client = tritonclient.grpc.InferenceServerClient(grpc_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def require_ready(self) -> None:
        """Raise :class:`EngineUnavailableError` unless the server is up and done with starting."""
        if not self._ask("is_server_live"):
            raise EngineUnavailableError(f"the server at {self._url} is starting or stopping; try again.")

    def models(self) -> dict[str, ServedModel]:
        """Return every model of the server's repository by name."""
        index = self._ask("get_model_repository_index")
        found: dict[str, ServedModel] = {}
        for model in index.models:
            known = found.get(model.name)
            if known is None or not known.is_ready:
                found[model.name] = ServedModel(model.state, model.reason)
        return found

    def load(self, model: str) -> float:
        """Load a model and return the seconds it took.

        Raises :class:`PromotionError` with the server's reason when it does not load.
        """
        started_s = time.perf_counter()
        self._change("load", model)
        return time.perf_counter() - started_s

    def unload(self, model: str, *, timeout_s: float = 60.0) -> None:
        """Unload a model and wait until it is gone: requests in flight end first."""
        self.begin_unload(model)
        deadline_s = time.monotonic() + timeout_s
        while (state := self.models().get(model)) is not None and state.holds_memory:
            if time.monotonic() >= deadline_s:
                raise PromotionError(f"model `{model}` did not unload within {timeout_s:g} s ({state.state}).")
            time.sleep(_POLL_S)

    def begin_unload(self, model: str) -> None:
        """Unload a model without waiting until it is gone."""
        self._change("unload", model)

    def parameters(self, model: str) -> dict[str, str]:
        """Return the parameters of a loaded model as the server holds them; empty when it is not loaded."""
        config = self._config(model)
        return {} if config is None else {name: value.string_value for name, value in config.parameters.items()}

    def step_models(self, model: str) -> list[str]:
        """Return the names that a loaded ensemble calls, as the server holds them; empty when it is not loaded."""
        config = self._config(model)
        return [] if config is None else [step.model_name for step in config.ensemble_scheduling.step]

    def _config(self, model: str) -> Any:
        try:
            return self._client.get_model_config(model, client_timeout=_ASK_TIMEOUT_S).config
        except InferenceServerException as error:
            self._raise_if_gone(error)
            return None

    def _ask(self, method: str) -> Any:
        try:
            return getattr(self._client, method)(client_timeout=_ASK_TIMEOUT_S)
        except InferenceServerException as error:
            self._raise_if_gone(error)
            raise PromotionError(f"the server at {self._url} refused: {error.message()}.") from error

    def _change(self, verb: str, model: str) -> None:
        try:
            getattr(self._client, f"{verb}_model")(model, client_timeout=self._load_timeout_s)
        except InferenceServerException as error:
            self._raise_if_gone(error)
            reason = _last_words(error.message())
            raise PromotionError(f"the server could not {verb} `{model}`: {reason}.") from error

    def _raise_if_gone(self, error: InferenceServerException) -> None:
        if error.status() in _NOT_THERE:
            msg = f"the server at {self._url} does not answer ({error.message()})."
            raise EngineUnavailableError(msg) from error


def _last_words(message: str) -> str:
    """The model's own words of Triton's chain of messages, without the traceback that Python models add."""
    text = message.split("\n\nAt:", maxsplit=1)[0].split("\\n\\nAt:", maxsplit=1)[0]
    for prefix in ("version 1: ", "Internal: ", "version 1 is at UNAVAILABLE state: "):
        text = text.rsplit(prefix, maxsplit=1)[-1]
    return " ".join(text.split()).rstrip(".;")
