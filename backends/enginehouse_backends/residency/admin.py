"""The administration of the server that the front door itself runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from enginehouse_backends.server.administration import TritonAdministration
from enginehouse_backends.server.supervisor import read_state
from enginehouse_contract.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_UNLOAD_TIMEOUT_S: Final = 60.0


class OwnServer:
    """Loads and unloads over gRPC: a load through Python's own calls would block the front door (Triton 2.51).

    The address is the one that *grpc_url* returns, else that of the server that runs on *home*.
    """

    def __init__(self, home: Path, grpc_url: Callable[[], str | None]) -> None:
        self._home = home
        self._grpc_url = grpc_url

    def loaded_engines(self) -> set[str]:
        """Return the names of the models that are ready."""
        with self._open() as server:
            return {name for name, model in server.models().items() if model.is_ready}

    def load(self, engine: str) -> None:
        """Load a model; it is ready on return."""
        with self._open() as server:
            server.load(engine)

    def unload(self, engine: str) -> None:
        """Unload a model; its process is gone on return."""
        with self._open() as server:
            server.unload(engine, timeout_s=_UNLOAD_TIMEOUT_S)

    def clear(self, engine: str) -> None:
        """Unload a model whose process is gone, so that it can be loaded anew.

        Triton waits for the requests that were in flight, and those of a dead process never end: it says UNLOADING for
        ever, and loads the model all the same.
        """
        with self._open() as server:
            server.begin_unload(engine)

    def _open(self) -> TritonAdministration:
        url = self._grpc_url()
        if url is None:
            state = read_state(self._home)
            if state is None:
                raise EngineUnavailableError("the server is still starting.")
            url = state.grpc_url
        return TritonAdministration(url)
