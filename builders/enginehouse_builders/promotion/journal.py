"""The journal of one change: what is meant to happen, and how far it has come.

::

    PLANNED -> PUBLISHED -> LOADED -> CHECKED -> SWITCHING -> SWITCHED -> COMMITTED -> (drain, unload) ended
    `-------- undone when cut short ---------'  `------- completed when cut short ---------------------'

SWITCHING is written before the first stable name moves: from then on requests may reach the new release, and the way
forward is the short one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

from enginehouse_contract.errors import PromotionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from enginehouse_contract.release import Stage

Action = Literal["promote", "rollback", "canary_start", "canary_end", "stage"]
Swap = Literal["overlap", "unload_first"]


class Step(IntEnum):
    """How far an operation has come; the order counts."""

    PLANNED = 0
    PUBLISHED = 1
    LOADED = 2
    CHECKED = 3
    SWITCHING = 4
    SWITCHED = 5
    COMMITTED = 6


@dataclass(frozen=True, slots=True)
class Routing:
    """Which releases answer: ``stable`` behind every stable name, ``canary`` a share of the front door's requests."""

    stable: int
    canary: int | None = None
    share: float = 0.0
    by: str = "tenant"
    min_requests: int = 50  # of the canary, before it is looked at

    @property
    def releases(self) -> tuple[int, ...]:
        """Every release that may get a request."""
        return (self.stable,) if self.canary is None else (self.stable, self.canary)


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of what is served."""

    action: Action
    stage: Stage
    target: int  # the release it is about
    before: Routing
    after: Routing
    who: str
    why: str = ""
    override: str = ""
    gates: tuple[Mapping[str, Any], ...] = ()
    swap: Swap = "overlap"
    keep_loaded: bool = False  # the release that answered before stays loaded
    number: int = 0
    step: Step = Step.PLANNED

    def body(self) -> dict[str, Any]:
        """Return what the journal stores besides number and step."""
        body = asdict(self)
        del body["number"], body["step"]
        return body

    @classmethod
    def parse(cls, number: int, step: str, body: dict[str, Any]) -> Operation:
        """Read what :meth:`body` wrote; raise :class:`PromotionError` when another Enginehouse wrote it."""
        try:
            before, after = Routing(**body.pop("before")), Routing(**body.pop("after"))
            gates = tuple(body.pop("gates"))
            return cls(before=before, after=after, gates=gates, number=number, step=Step[step], **body)
        except (KeyError, TypeError) as error:
            raise PromotionError(f"operation {number} in the release book cannot be read ({error}).") from error
