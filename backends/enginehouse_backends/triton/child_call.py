"""Calling another model of the server from inside one (BLS), without the ways in which that crashes the stub.

On Triton 2.51 a response iterator freed soon after its last response takes the stub process with it (a cleanup thread
destroys numpy objects without the GIL; fixed upstream in 25.01). Each iterator is therefore kept for some seconds after
its end. Iterating is done in an ordinary thread: in an event loop it would block every other request.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from enginehouse_contract.errors import (
    EngineFailureError,
    EnginehouseError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

_KEEP_ITERATORS_S: Final = 5.0

_UNHEALTHY: Final = ("is not healthy", "is not ready", "is not found", "has no available versions", "unknown model")
"""What Triton's messages say when the called model is not there to answer."""


_REFUSAL: Final = re.compile(r"^`[\w.\[\]-]+`")

_WORDS: Final[dict[str, type[EnginehouseError]]] = {
    "queue is full": OverloadedError,
    "was cancelled": RequestCancelledError,
    "shutting down": EngineUnavailableError,
    "reload the model": EngineUnavailableError,
}


class _Graveyard:
    """Keeps finished response iterators referenced for :data:`_KEEP_ITERATORS_S`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buried: deque[tuple[float, Any]] = deque()

    def bury(self, iterator: Any) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._buried.append((now_s, iterator))
            while self._buried[0][0] < now_s - _KEEP_ITERATORS_S:
                self._buried.popleft()


_GRAVEYARD = _Graveyard()


def call_model(
    model_name: str,
    inputs: Mapping[str, NDArray[Any]],
    requested_outputs: Sequence[str],
    *,
    request_id: str,
    parameters: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, NDArray[Any]]]:
    """Call a decoupled model and yield the tensors of each data response, until its final one.

    Raises an error of our tree as :func:`error_of_message` reads the called model's. Blocks in ``next``.
    """
    server = importlib.import_module("triton_python_backend_utils")
    request = server.InferenceRequest(
        request_id=request_id,
        model_name=model_name,
        inputs=[server.Tensor(name, value) for name, value in inputs.items()],
        requested_output_names=list(requested_outputs),
        parameters=dict(parameters or {}),
        preferred_memory=server.PreferredMemory(server.TRITONSERVER_MEMORY_CPU, 0),
    )
    try:
        responses = request.exec(decoupled=True)
    except server.TritonModelException as error:
        raise error_of_message(str(error)) from error
    try:
        for response in responses:
            if response.has_error():
                raise error_of_message(response.error().message(), response.error().code())
            tensors = response.output_tensors()
            if tensors:
                yield {tensor.name(): tensor.as_numpy() for tensor in tensors}
    finally:
        _GRAVEYARD.bury(responses)


def error_of_message(message: str, code: object = None) -> EnginehouseError:
    """Turn a called model's error into ours.

    Triton 2.51 answers INTERNAL for every error that crosses a call between models, so where the code says no more, the
    words decide: a refusal of ours begins with its field in backticks.
    """
    if any(words in message for words in _UNHEALTHY):
        return EngineUnavailableError(f"the engine is not there to answer: {message}")
    by_code = _errors_by_code().get(code)
    if by_code is not None:
        return by_code(message)
    if _REFUSAL.search(message):
        return (UnsupportedFeatureError if "not supported" in message else InvalidRequestError)(message)
    for words, kind in _WORDS.items():
        if words in message:
            return kind(message)
    return EngineFailureError(message)


def _errors_by_code() -> dict[object, type[EnginehouseError]]:
    error = importlib.import_module("triton_python_backend_utils").TritonError
    return {
        error.INVALID_ARG: InvalidRequestError,
        error.UNSUPPORTED: UnsupportedFeatureError,
        error.UNAVAILABLE: OverloadedError,
        error.CANCELLED: RequestCancelledError,
    }
