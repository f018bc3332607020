"""Which engines are loaded: decisions only, no threads, no server, no clock of its own.

Each engine is absent, loading, ready or unloading. What is not absent counts against the budget, so the sum never
exceeds it. A request to a ready engine goes ahead and counts as in flight until it ends; a request to another waits
for the load, for at most ``max_wait_s``. Room is made by unloading the engines whose last use is longest ago, among
those that are ready, not pinned and without a request in flight; when that would not make enough room, nothing is
unloaded and the next engine somebody waits for is tried. There is no reservation: an engine that finds no room because
others are never idle answers with a retry hint.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from enginehouse_backends.residency.records import Action, Lease, ManagedEngine, TrackedEngine, Waiter
from enginehouse_contract.errors import ConfigurationError, EngineUnavailableError, OverloadedError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from enginehouse_backends.residency.records import ResidencyLimits, State
    from enginehouse_contract.errors import EnginehouseError


class ResidencyPolicy:
    """The state of every managed engine. Not thread-safe: its owner holds a lock around each call."""

    def __init__(self, limits: ResidencyLimits, engines: Iterable[ManagedEngine]) -> None:
        self._tracked: dict[str, TrackedEngine] = {}
        self._waiting_for: dict[str, str] = {}  # key -> engine
        self.configure(limits, engines)

    def configure(self, limits: ResidencyLimits, engines: Iterable[ManagedEngine]) -> dict[str, EnginehouseError]:
        """Take other limits and engines from now on; return waiting keys whose engine is gone, with their errors.

        An engine that is no longer named is unloaded once it is idle. Raises :class:`ConfigurationError`, changing
        nothing, when the pinned engines do not fit, or another would never fit beside them.
        """
        wanted = {engine.name: engine for engine in engines}
        _check(limits, list(wanted.values()))
        self.limits = limits
        for name, engine in wanted.items():
            tracked = self._tracked.setdefault(name, TrackedEngine(engine))
            tracked.is_wanted = True
            if tracked.state == "absent":
                tracked.engine = engine
            else:  # what it takes was settled when it was loaded
                tracked.engine = ManagedEngine(name, tracked.engine.num_bytes, engine.is_pinned)
        gone: dict[str, EnginehouseError] = {}
        for name, tracked in list(self._tracked.items()):
            if name not in wanted:
                tracked.is_wanted = False
                error = EngineUnavailableError(f"the engine `{name}` was taken out of service.")
                gone |= dict.fromkeys(self._drop_waiters(tracked), error)
                if tracked.state == "absent":
                    del self._tracked[name]
        return gone

    def manages(self, name: str) -> bool:
        """Return whether requests to this engine need a lease."""
        return name in self._tracked

    def state_of(self, name: str) -> State:
        """Return an engine's state."""
        return self._tracked[name].state

    @property
    def num_resident_bytes(self) -> int:
        """What is loaded, being loaded or being unloaded."""
        return sum(tracked.num_resident_bytes for tracked in self._tracked.values())

    def enter(self, name: str, key: str, now_s: float) -> Lease | None:
        """Claim an engine for a request; None means that *key* waits until ``loaded`` names it.

        Raises :class:`OverloadedError` when too many wait, or the engine failed to load a moment ago, and
        :class:`EngineUnavailableError` when it was taken out of service; then nothing waits.
        """
        assert key not in self._waiting_for, "a key waits once"
        tracked = self._tracked[name]
        if not tracked.is_wanted:
            raise EngineUnavailableError(f"the engine `{name}` was taken out of service.")
        if tracked.state == "ready":
            return self._grant(tracked, now_s)
        if now_s < tracked.not_before_s:
            msg = f"the engine `{name}` did not load: {tracked.last_failure.rstrip('.')}."
            raise _retry_in(tracked.not_before_s - now_s, msg)
        if len(tracked.waiters) >= self.limits.max_waiting:
            msg = f"{len(tracked.waiters)} requests wait for the engine `{name}` to load."
            raise _retry_in(self._load_remaining_s(tracked, now_s), msg)
        tracked.waiters.append(Waiter(key, now_s))
        self._waiting_for[key] = name
        return None

    def leave(self, lease: Lease, now_s: float) -> None:
        """End a request's claim."""
        tracked = self._tracked.get(lease.engine)
        if tracked is None or tracked.load_number != lease.load_number or tracked.state != "ready":
            return
        assert tracked.num_in_flight > 0, "a lease ends once"
        tracked.num_in_flight -= 1
        tracked.last_used_s = now_s

    def give_up(self, key: str) -> None:
        """Stop waiting; a key that does not wait is passed over."""
        name = self._waiting_for.pop(key, None)
        if name is not None:
            waiters = self._tracked[name].waiters
            waiters.remove(next(waiter for waiter in waiters if waiter.key == key))

    def expired(self, now_s: float) -> dict[str, EnginehouseError]:
        """Return the keys that have waited as long as they may, with the error each gets; they wait no more."""
        over: dict[str, EnginehouseError] = {}
        for name, tracked in self._tracked.items():
            while tracked.waiters and now_s - tracked.waiters[0].since_s >= self.limits.max_wait_s:
                key = tracked.waiters.popleft().key
                del self._waiting_for[key]
                msg = f"the engine `{name}` was not loaded within {self.limits.max_wait_s:g} s ({self._why(tracked)})."
                over[key] = _retry_in(self._load_remaining_s(tracked, now_s), msg)
        return over

    def next_action(self, now_s: float) -> Action | None:
        """Return what to begin now, or None; call again after each, until None."""
        is_over = self._free_bytes() + self._coming_bytes() < 0  # a smaller budget, or engines loaded by hand
        for tracked in self._idle_engines(now_s):
            if is_over or not tracked.is_wanted or self._has_idled_out(tracked, now_s):
                return self._begin("unload", tracked, now_s)
        for tracked in sorted(self._tracked.values(), key=_order):
            if tracked.state != "absent" or now_s < tracked.not_before_s:
                continue
            if tracked.waiters or (tracked.engine.is_pinned and tracked.is_wanted):
                victims = self._victims(tracked.engine.num_bytes, now_s)
                if victims:
                    return self._begin("unload", victims[0], now_s)
                if victims is not None and self._free_bytes() >= tracked.engine.num_bytes:
                    return self._begin("load", tracked, now_s)
        return None

    def loaded(self, name: str, now_s: float) -> dict[str, Lease]:
        """An engine is ready, because of a load or found so; return the leases of those that waited."""
        tracked = self._tracked[name]
        if tracked.state == "loading":
            tracked.load_took_s = now_s - tracked.began_s
        tracked.state = "ready"
        tracked.load_number += 1
        tracked.num_in_flight = 0
        tracked.last_used_s = now_s
        tracked.last_failure = ""
        return {key: self._grant(tracked, now_s) for key in self._drop_waiters(tracked)}

    def unloaded(self, name: str) -> None:
        """An engine is gone and its memory free."""
        tracked = self._tracked[name]
        tracked.state = "absent"
        tracked.num_in_flight = 0
        tracked.not_before_s = -math.inf
        if not tracked.is_wanted:
            del self._tracked[name]

    def failed(self, name: str, reason: str, now_s: float) -> Mapping[str, Lease | EnginehouseError]:
        """The running action on an engine failed; return the keys that waited, each with its error or its lease.

        After a failed load the engine is absent, after a failed unload ready as before; either is not tried again for
        ``failure_pause_s``.
        """
        tracked = self._tracked[name]
        if tracked.state == "unloading":
            tracked.state = "ready"
            tracked.not_before_s = now_s + self.limits.failure_pause_s
            return {key: self._grant(tracked, now_s) for key in self._drop_waiters(tracked)}
        tracked.state = "absent"
        tracked.not_before_s = now_s + self.limits.failure_pause_s
        tracked.last_failure = reason
        error = EngineUnavailableError(f"the engine `{name}` did not load: {reason.rstrip('.')}.")
        failed: dict[str, Lease | EnginehouseError] = dict.fromkeys(self._drop_waiters(tracked), error)
        if not tracked.is_wanted:
            del self._tracked[name]
        return failed

    def lost(self, name: str, now_s: float) -> Action | None:
        """An engine that was ready does not answer any more; return the unload that clears what is left of it."""
        tracked = self._tracked[name]
        if tracked.state != "ready":
            return None
        tracked.num_in_flight = 0
        tracked.load_number += 1  # voids the leases
        return self._begin("clear", tracked, now_s)

    def is_only_lease(self, lease: Lease) -> bool:
        """Return whether a valid lease is the only one on its engine."""
        tracked = self._tracked.get(lease.engine)
        return tracked is not None and (tracked.load_number, tracked.num_in_flight) == (lease.load_number, 1)

    def next_wakeup_s(self, now_s: float) -> float | None:
        """Return when time alone will change something next; None when only an event can."""
        moments = []
        for tracked in self._tracked.values():
            if tracked.waiters:
                moments.append(tracked.waiters[0].since_s + self.limits.max_wait_s)
            if tracked.is_evictable and self.limits.idle_unload_s is not None:
                moments.append(max(tracked.last_used_s + self.limits.idle_unload_s, tracked.not_before_s))
            if tracked.not_before_s > now_s:
                moments.append(tracked.not_before_s)
        return min(moments, default=None)

    def _grant(self, tracked: TrackedEngine, now_s: float) -> Lease:
        tracked.num_in_flight += 1
        tracked.last_used_s = now_s
        return Lease(tracked.engine.name, tracked.load_number)

    def _begin(self, kind: Literal["load", "unload", "clear"], tracked: TrackedEngine, now_s: float) -> Action:
        tracked.state = "loading" if kind == "load" else "unloading"
        tracked.began_s = now_s
        return Action(kind, tracked.engine.name)

    def _victims(self, num_bytes: int, now_s: float) -> list[TrackedEngine] | None:
        """What to unload so that *num_bytes* fit, longest unused first; empty: nothing more; None: it cannot be."""
        missing = num_bytes - self._free_bytes() - self._coming_bytes()
        victims: list[TrackedEngine] = []
        for tracked in self._idle_engines(now_s):
            if missing <= 0:
                break
            victims.append(tracked)
            missing -= tracked.engine.num_bytes
        if missing > 0:
            return None
        for tracked in reversed(victims.copy()):  # a small one is spared where a larger one goes anyway
            if missing + tracked.engine.num_bytes <= 0:
                victims.remove(tracked)
                missing += tracked.engine.num_bytes
        return victims

    def _idle_engines(self, now_s: float) -> list[TrackedEngine]:
        """What may be unloaded now, longest unused first."""
        idle = (each for each in self._tracked.values() if each.is_evictable and now_s >= each.not_before_s)
        return sorted(idle, key=lambda each: each.last_used_s)

    def _free_bytes(self) -> int:
        return self.limits.memory_budget_bytes - self.num_resident_bytes

    def _coming_bytes(self) -> int:
        """What is being unloaded and will be free soon."""
        return sum(tracked.engine.num_bytes for tracked in self._tracked.values() if tracked.state == "unloading")

    def _has_idled_out(self, tracked: TrackedEngine, now_s: float) -> bool:
        limit_s = self.limits.idle_unload_s
        return limit_s is not None and now_s >= tracked.last_used_s + limit_s

    def _drop_waiters(self, tracked: TrackedEngine) -> list[str]:
        keys = [waiter.key for waiter in tracked.waiters]
        tracked.waiters.clear()
        for key in keys:
            del self._waiting_for[key]
        return keys

    def _load_remaining_s(self, tracked: TrackedEngine, now_s: float) -> float:
        elapsed_s = now_s - tracked.began_s if tracked.state == "loading" else 0.0
        return max(1.0, tracked.load_took_s - elapsed_s)

    def _why(self, tracked: TrackedEngine) -> str:
        if tracked.state != "absent":
            return f"it is {tracked.state}"
        busy = sorted(name for name, each in self._tracked.items() if each.num_in_flight and not each.engine.is_pinned)
        return f"no room beside {', '.join(busy)}, which are in use" if busy else "others are being unloaded"


def _retry_in(wait_s: float, message: str) -> OverloadedError:
    """A refusal whose words carry the hint too, since a stream's error is nothing but words."""
    wait_s = max(1, math.ceil(wait_s))
    return OverloadedError(f"{message} Retry in about {wait_s} s.", float(wait_s))


def _order(tracked: TrackedEngine) -> float:
    """Pinned engines that nobody waits for come first, then who has waited longest."""
    return tracked.waiters[0].since_s if tracked.waiters else -math.inf


def _check(limits: ResidencyLimits, engines: list[ManagedEngine]) -> None:
    pinned = sum(engine.num_bytes for engine in engines if engine.is_pinned)
    budget = limits.memory_budget_bytes
    if pinned > budget:
        raise ConfigurationError(
            refusal("memory_budget", "does not hold the pinned services", limit=f"{budget} bytes", given=pinned)
        )
    for engine in engines:
        if not engine.is_pinned and pinned + engine.num_bytes > budget:
            beside = f" beside the pinned services ({pinned} bytes)" if pinned else ""
            problem = f"does not hold `{engine.name}`{beside}"
            raise ConfigurationError(refusal("memory_budget", problem, limit=f"{budget} bytes", given=engine.num_bytes))
