"""What the residency policy speaks in: engines, limits, actions, leases, and what it remembers of each engine."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

State = Literal["absent", "loading", "ready", "unloading"]


@dataclass(frozen=True, slots=True)
class ManagedEngine:
    """One engine model of the server; *num_bytes* is what it takes when loaded. A pinned one is always loaded."""

    name: str
    num_bytes: int
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class ResidencyLimits:
    """Limits of one host; times in seconds. ``idle_unload_s`` of None keeps an idle engine until room is needed."""

    memory_budget_bytes: int
    max_wait_s: float = 30.0
    idle_unload_s: float | None = None
    max_waiting: int = 32  # requests that wait for one engine
    failure_pause_s: float = 10.0  # before what failed to load or unload is tried again


@dataclass(frozen=True, slots=True)
class Action:
    """What to do next; the policy counts it as begun. Report its end by ``loaded``, ``unloaded`` or ``failed``.

    ``clear`` unloads an engine whose process is gone: there is nothing to wait for.
    """

    kind: Literal["load", "unload", "clear"]
    engine: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A request's claim on a ready engine. One of an earlier load of the engine is void."""

    engine: str
    load_number: int


@dataclass(slots=True)
class Waiter:
    """A request that waits for a load."""

    key: str
    since_s: float


@dataclass(slots=True)
class TrackedEngine:
    """What the policy knows of one engine."""

    engine: ManagedEngine
    is_wanted: bool = True  # False once it was taken out of the configuration
    state: State = "absent"
    num_in_flight: int = 0
    load_number: int = 0
    last_used_s: float = -math.inf
    began_s: float = 0.0  # of the running action
    load_took_s: float = 5.0  # a guess until one was seen
    not_before_s: float = -math.inf
    last_failure: str = ""
    waiters: deque[Waiter] = field(default_factory=deque)

    @property
    def is_evictable(self) -> bool:
        """Whether it may be unloaded now."""
        return self.state == "ready" and self.num_in_flight == 0 and not (self.engine.is_pinned and self.is_wanted)

    @property
    def num_resident_bytes(self) -> int:
        """What it takes of the budget now."""
        return 0 if self.state == "absent" else self.engine.num_bytes
