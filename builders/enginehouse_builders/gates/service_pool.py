"""Two builds served side by side, or in turn where the host has no room for both."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

    from enginehouse_builders.gates.services import EngineService, GateTools
    from enginehouse_builders.store import StoredBuild


class ServicePool:
    """Serves builds on demand, at most *max_served* at a time; a context manager that unloads them all."""

    def __init__(self, tools: GateTools, max_served: int = 1) -> None:
        self._tools = tools
        self.max_served = max_served
        self._open: dict[str, tuple[EngineService, ExitStack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            self._close_one()

    def get(self, build: StoredBuild) -> EngineService:
        """Return the build's service, which is loaded first if it is not, and another unloaded where it must be."""
        key = str(build.build_dir)
        if key not in self._open:
            while len(self._open) >= self.max_served:
                self._close_one()
            stack = ExitStack()
            self._open[key] = (stack.enter_context(self._tools.serve(build)), stack)
        return self._open[key][0]

    def _close_one(self) -> None:
        _, stack = self._open.pop(next(iter(self._open)))
        stack.close()
