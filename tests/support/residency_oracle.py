"""A slow oracle of the residency policy, and random traffic that compares the two."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginehouse_backends.residency.policy import ResidencyPolicy
from enginehouse_backends.residency.records import Action, Lease, ManagedEngine, ResidencyLimits
from enginehouse_contract.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass
class Oracle:
    """What must hold, recomputed from the log each time; slow, and without state of its own beside the log."""

    limits: ResidencyLimits
    engines: dict[str, ManagedEngine]
    log: list[tuple[str, str, str, float]] = field(default_factory=list)  # (event, engine, key, time)

    def state(self, engine: str) -> str:
        after = {"load": "loading", "loaded": "ready", "unload": "unloading", "unloaded": "absent",
                 "load failed": "absent", "unload failed": "ready", "lost": "unloading",
                 "clear failed": "ready"}  # fmt: skip
        states = [after[event] for event, name, _, _ in self.log if name == engine and event in after]
        return states[-1] if states else "absent"

    def in_flight(self, engine: str) -> set[str]:
        held: set[str] = set()
        for event, name, key, _ in self.log:
            if name == engine:
                if event == "lease":
                    held.add(key)
                elif event == "leave":
                    held.discard(key)
                elif event in {"lost", "unloaded"}:
                    held.clear()
        return held

    def waiting(self) -> list[tuple[str, str, float]]:
        """(engine, key, since), longest first."""
        waits = [(name, key, now_s) for event, name, key, now_s in self.log if event == "wait"]
        over = {key for event, _, key, _ in self.log if event in {"lease", "give up", "refused"}}
        return [wait for wait in waits if wait[1] not in over]

    def last_used_s(self, engine: str) -> float:
        return max(
            now_s for event, name, _, now_s in self.log if name == engine and event in {"loaded", "lease", "leave"}
        )

    def paused(self, engine: str, now_s: float) -> bool:
        failures = [at for event, name, _, at in self.log if name == engine and event.endswith("failed")]
        return bool(failures) and now_s < failures[-1] + self.limits.failure_pause_s

    def num_bytes(self, *states: str) -> int:
        return sum(engine.num_bytes for name, engine in self.engines.items() if self.state(name) in states)

    def idle(self, now_s: float) -> list[str]:
        def may_go(name: str) -> bool:
            is_free = self.state(name) == "ready" and not self.in_flight(name)
            return is_free and not self.engines[name].is_pinned and not self.paused(name, now_s)

        return sorted(filter(may_go, self.engines), key=self.last_used_s)

    def wanted(self, now_s: float) -> list[str]:
        """Engines that should be loaded, most urgent first."""
        since = {name: -1.0 for name, engine in self.engines.items() if engine.is_pinned}
        since |= {name: at for name, _, at in reversed(self.waiting())}
        absent = [
            name
            for name in self.engines
            if name in since and self.state(name) == "absent" and not self.paused(name, now_s)
        ]
        return sorted(absent, key=lambda name: since[name])

    def check_action(self, action: Action, now_s: float) -> None:
        """An action that was begun is one that the rules ask for. Called before it is logged."""
        idle, coming = self.idle(now_s), self.coming_bytes()
        if action.kind == "load":
            assert action.engine in self.wanted(now_s)
            assert self.engines[action.engine].num_bytes <= coming - self.num_bytes("unloading")
            return
        assert action.engine in idle
        limit_s = self.limits.idle_unload_s
        if limit_s is not None and now_s >= self.last_used_s(action.engine) + limit_s:
            return
        reachable = coming + self.sum_bytes(idle)
        needs = [self.engines[name].num_bytes for name in self.wanted(now_s)]
        needed = next((need - coming for need in needs if coming < need <= reachable), None)
        assert needed is not None, "somebody waits for the room, and it can be made"
        earlier = idle[: idle.index(action.engine)]
        assert self.sum_bytes(earlier) < needed, "those unused for longer would have been enough"

    def check_rest(self, now_s: float) -> None:
        """When nothing is begun, nothing could be."""
        idle, coming = self.idle(now_s), self.coming_bytes()
        for name in self.wanted(now_s):
            need = self.engines[name].num_bytes
            assert need > coming - self.num_bytes("unloading"), f"{name} fits and is not loaded"
            assert need <= coming or need > coming + self.sum_bytes(idle), f"room for {name} could be made"
        if self.limits.idle_unload_s is not None:
            assert all(now_s < self.last_used_s(name) + self.limits.idle_unload_s for name in idle)

    def sum_bytes(self, names: Iterable[str]) -> int:
        return sum(self.engines[name].num_bytes for name in names)

    def coming_bytes(self) -> int:
        """What is free now or as soon as what is being unloaded is gone."""
        return self.limits.memory_budget_bytes - self.num_bytes("loading", "ready")


class Simulation:
    """Random events put to the policy and written into the oracle's log, compared after each."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        names = [f"e{index}" for index in range(rng.randint(2, 6))]
        engines = {name: ManagedEngine(name, rng.randint(1, 50), is_pinned=rng.random() < 0.15) for name in names}
        pinned = sum(engine.num_bytes for engine in engines.values() if engine.is_pinned)
        largest = max((engine.num_bytes for engine in engines.values() if not engine.is_pinned), default=0)
        limits = ResidencyLimits(
            pinned + largest + rng.randint(0, 40),
            max_wait_s=rng.choice([1.0, 5.0]),
            failure_pause_s=2.0,
            idle_unload_s=rng.choice([None, 3.0]),
            max_waiting=rng.choice([1, 4]),
        )
        self.engines, self.limits = engines, limits
        self.policy, self.oracle = ResidencyPolicy(limits, engines.values()), Oracle(limits, engines)
        self.num_keys = 0
        self.leases: dict[str, Lease] = {}
        self.running: list[Action] = []
        self.now_s = 0.0

    def run(self, num_events: int) -> None:
        events = [self.enter, self.leave, self.give_up, self.finish, self.die]
        for _ in range(num_events):
            self.now_s += self.rng.choice([0.0, 0.1, 0.5])
            self.rng.choices(events, [10, 8, 1, 6, 0.3])[0]()
            self.let_waits_expire()
            self.begin_actions()
            self.compare()

    def enter(self) -> None:
        name, self.num_keys = self.rng.choice(sorted(self.engines)), self.num_keys + 1
        key = f"k{self.num_keys}"
        num_waiting = sum(wait[0] == name for wait in self.oracle.waiting())
        try:
            lease = self.policy.enter(name, key, self.now_s)
        except OverloadedError:
            assert self.oracle.state(name) != "ready"
            assert num_waiting == self.limits.max_waiting or self.oracle.paused(name, self.now_s)
            return
        assert (lease is None) == (self.oracle.state(name) != "ready")
        if lease is None:
            assert num_waiting < self.limits.max_waiting
            self.note("wait", name, key)
        else:
            self.note_leases({key: lease}, name)

    def leave(self) -> None:
        if self.leases:
            key, lease = self.rng.choice(sorted(self.leases.items()))
            del self.leases[key]
            if key in self.oracle.in_flight(lease.engine):
                self.note("leave", lease.engine, key)
            self.policy.leave(lease, self.now_s)

    def give_up(self) -> None:
        if waiting := self.oracle.waiting():
            name, key, _ = self.rng.choice(waiting)
            self.policy.give_up(key)
            self.note("give up", name, key)

    def finish(self) -> None:
        if not self.running:
            return
        action = self.running.pop(self.rng.randrange(len(self.running)))
        name = action.engine
        waiting = {key for engine, key, _ in self.oracle.waiting() if engine == name}
        if self.rng.random() < 0.2:
            self.note(f"{action.kind} failed", name)
            told = self.policy.failed(name, "broken", self.now_s)
            assert set(told) == waiting
            for key, outcome in told.items():
                assert isinstance(outcome, Lease) == (action.kind != "load")
                if isinstance(outcome, Lease):
                    self.note_leases({key: outcome}, name)
                else:
                    self.note("refused", name, key)
        elif action.kind == "load":
            self.note("loaded", name)
            granted = self.policy.loaded(name, self.now_s)
            assert set(granted) == waiting
            self.note_leases(granted, name)
        else:
            self.note("unloaded", name)
            self.policy.unloaded(name)

    def die(self) -> None:
        name = self.rng.choice(sorted(self.engines))
        action = self.policy.lost(name, self.now_s)
        assert (action is not None) == (self.oracle.state(name) == "ready")
        if action is not None:
            self.note("lost", name)
            self.running.append(action)

    def let_waits_expire(self) -> None:
        over = self.policy.expired(self.now_s)
        longest_s = self.limits.max_wait_s
        assert set(over) == {key for _, key, since_s in self.oracle.waiting() if self.now_s - since_s >= longest_s}
        for key in over:
            self.note("refused", "", key)

    def begin_actions(self) -> None:
        while (action := self.policy.next_action(self.now_s)) is not None:
            self.oracle.check_action(action, self.now_s)
            self.note(action.kind, action.engine)
            self.running.append(action)
        self.oracle.check_rest(self.now_s)

    def compare(self) -> None:
        policy, oracle = self.policy, self.oracle
        assert {name: policy.state_of(name) for name in self.engines} == {
            name: oracle.state(name) for name in self.engines
        }
        assert policy.num_resident_bytes == oracle.num_bytes("loading", "ready", "unloading")
        assert policy.num_resident_bytes <= self.limits.memory_budget_bytes
        assert all(oracle.state(name) != "ready" for name, _, _ in oracle.waiting())
        wakeup_s = policy.next_wakeup_s(self.now_s)
        ends_s = [since_s + self.limits.max_wait_s for _, _, since_s in oracle.waiting()]
        assert wakeup_s is not None or not ends_s
        assert all(wakeup_s is not None and wakeup_s <= end_s for end_s in ends_s)

    def note(self, event: str, name: str, key: str = "") -> None:
        self.oracle.log.append((event, name, key, self.now_s))

    def note_leases(self, granted: dict[str, Lease], name: str) -> None:
        for key, lease in granted.items():
            self.note("lease", name, key)
            self.leases[key] = lease
