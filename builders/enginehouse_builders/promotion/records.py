"""What the release book tells of stages: their events, a canary, and what one commit changes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.release import STAGES, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOVES: Final = frozenset({"serve", "promote", "rollback"})
"""Actions that move a stage's pointer."""


def parse_stage(text: str) -> Stage:
    """Return a stage by name; raise :class:`ConfigurationError` for another."""
    for stage in STAGES:
        if stage == text:
            return stage
    raise ConfigurationError(refusal("stage", f"must be {' or '.join(STAGES)}", given=text))


def now() -> str:
    """Return the time as text: ISO 8601, UTC."""
    return datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One line of a stage's history. The order is that of ``sequence``: clocks may be set back."""

    stage: Stage
    action: str  # serve, promote, rollback, canary_start, canary_end
    from_release: int | None
    to_release: int
    who: str
    why: str = ""
    override: str = ""  # the reason given for passing over the gates
    gates: Sequence[Mapping[str, Any]] = ()
    at: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Canary:
    """A release that answers a share of production's requests until it is judged."""

    release: int
    share: float
    by: str  # tenant or request: what sticks to a release
    min_requests: int = 50  # ended by the canary before the first look
    started_at: str = ""
    baseline: Mapping[str, Any] = field(default_factory=dict)  # counters of both releases when it began


@dataclass(frozen=True, slots=True)
class Change:
    """What one commit of an operation does to the book."""

    event: StageEvent
    moves_stage: bool = True
    canary: Canary | None = None  # the canary that is on afterwards
