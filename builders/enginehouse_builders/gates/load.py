"""The load gate: a real server loads the build under a name of its own, says which build it is, and answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from enginehouse_builders.gates.record import GateResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from enginehouse_builders.gates.record import Value
    from enginehouse_builders.gates.services import EngineService
    from enginehouse_builders.store import StoredBuild

_NUM_TOKENS: Final = 8


def load_gate(open_build: Callable[[], EngineService], build: StoredBuild, token_ids: Sequence[int]) -> GateResult:
    """Load a build, read back which one is served, and ask it the same thing twice.

    Raises errors of our tree, in the server's words, when it does not load or does not answer.
    """
    start_s = time.perf_counter()
    service = open_build()
    load_s = time.perf_counter() - start_s
    numbers: dict[str, Value] = {"load_s": round(load_s, 3), "served_build_id": service.served_build_id}
    if service.served_build_id != build.manifest.build_id:
        reason = f"the server says that it serves {service.served_build_id or 'no build'}: another build was loaded"
        return GateResult("load", "failed", reason, numbers)
    first, again = (_answer(service, token_ids) for _ in range(2))
    if len(first) != _NUM_TOKENS:
        reason = f"the engine answered {len(first)} tokens where {_NUM_TOKENS} were asked for"
        return GateResult("load", "failed", reason, numbers)
    if first != again:
        return GateResult("load", "failed", "the same greedy request got two answers", numbers)
    return GateResult("load", "passed", f"loaded in {load_s:.1f} s and answered", numbers)


def _answer(service: EngineService, token_ids: Sequence[int]) -> list[int]:
    return [token for new in service.stream(token_ids, _NUM_TOKENS) for token in new]
