"""What a run of the gates found, as plain data that goes to disk and comes back the same."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from enginehouse_contract.errors import BuildIntegrityError

Gate = Literal["integrity", "compatibility", "memory", "load", "numeric", "speed", "cost"]
Status = Literal["passed", "failed", "skipped"]
Value = float | int | str | bool | list[float] | None

GATES: Final[tuple[Gate, ...]] = get_args(Gate)
"""Every gate, in the order they run: cheap ones first, and after a failure the rest are skipped."""

FORMAT_VERSION: Final = 1
_MAY_BE_SKIPPED: Final = {"cost"}  # where nobody said what the machine costs and there is nothing to compare with


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate's outcome. Names of numbers and thresholds carry their units; ``reason`` says why."""

    gate: Gate
    status: Status
    reason: str
    numbers: dict[str, Value] = field(default_factory=dict)
    thresholds: dict[str, Value] = field(default_factory=dict)
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GateRecord:
    """One run of all gates over one build on one host."""

    build_id: str
    model_name: str
    against_build_id: str | None  # the reference; None: only what needs no reference was checked
    host_kind: str
    host: dict[str, Value]
    started_at: str  # ISO 8601, UTC
    tool_versions: dict[str, str]
    results: tuple[GateResult, ...]
    format_version: int = FORMAT_VERSION
    number: int | None = None  # of this build's records, given when it is written

    @property
    def passed(self) -> bool:
        """Whether every gate passed; the cost gate may be skipped, the others not."""
        by_gate = {result.gate: result.status for result in self.results}
        return all(
            by_gate.get(gate) == "passed" or (gate in _MAY_BE_SKIPPED and by_gate.get(gate) == "skipped")
            for gate in GATES
        )

    @property
    def why_not(self) -> str:
        """The first failure in words; empty for a record that passed."""
        for result in self.results:
            if result.status == "failed":
                return f"the {result.gate} gate failed: {result.reason}"
        missing = [gate for gate in GATES if gate not in {result.gate for result in self.results}]
        skipped = [result.gate for result in self.results if result.status == "skipped"]
        return "" if self.passed else f"gates were not run: {', '.join(skipped + missing)}"

    def to_json(self) -> str:
        """Return the record as JSON with sorted keys and a final newline; ``passed`` is there to be read by others."""
        return json.dumps({**dataclasses.asdict(self), "passed": self.passed}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "a gate record") -> GateRecord:
        """Parse :meth:`to_json`'s output; raise :class:`BuildIntegrityError` naming *where* when it is not one."""
        try:
            raw: dict[str, Any] = json.loads(text)
            if raw.get("format_version") != FORMAT_VERSION:
                version = raw.get("format_version")
                raise BuildIntegrityError(
                    f"{where}: format_version {version!r} is not {FORMAT_VERSION}; another Enginehouse wrote it."
                )
            raw.pop("passed", None)  # derived
            raw["results"] = tuple(GateResult(**result) for result in raw["results"])
            return cls(**raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BuildIntegrityError(f"{where} is not a gate record ({error}); run the gates again.") from error
