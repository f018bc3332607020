"""The residency policy against a slow oracle that recomputes everything from the log of events."""

from __future__ import annotations

import pytest
from tests.support.residency_oracle import Simulation

from enginehouse_backends.residency.policy import ResidencyPolicy
from enginehouse_backends.residency.records import Action, Lease, ManagedEngine, ResidencyLimits
from enginehouse_contract.errors import ConfigurationError, EngineUnavailableError, OverloadedError


def make_policy(budget: int, *engines: ManagedEngine, **limits: float) -> ResidencyPolicy:
    """A policy over these engines."""
    return ResidencyPolicy(ResidencyLimits(budget, **limits), engines)  # type: ignore[arg-type]


def load(policy: ResidencyPolicy, name: str, now_s: float) -> dict[str, Lease]:
    """Carry out the load that the policy asks for."""
    assert policy.next_action(now_s) == Action("load", name)
    return policy.loaded(name, now_s)


A, B, C = ManagedEngine("a", 60), ManagedEngine("b", 60), ManagedEngine("c", 30)


def test_a_first_request_loads_its_engine_and_waits_for_it() -> None:
    """The key waits, the engine loads once, the load hands out the lease; later requests go ahead at once."""
    policy = make_policy(100, A)

    assert policy.enter("a", "first", 0.0) is None
    assert policy.enter("a", "second", 0.1) is None
    assert policy.next_action(0.2) == Action("load", "a")
    assert policy.next_action(0.3) is None
    leases = policy.loaded("a", 2.0)

    assert list(leases) == ["first", "second"]
    assert policy.enter("a", "third", 3.0) is not None


def test_room_is_made_by_the_longest_unused() -> None:
    """Of two idle engines the one used earlier goes; the load begins when it is gone."""
    policy = make_policy(100, A, C, ManagedEngine("d", 40))
    for name, now_s in (("c", 0.0), ("a", 1.0)):
        policy.enter(name, name, now_s)
        (lease,) = load(policy, name, now_s).values()
        policy.leave(lease, now_s + 0.5)

    policy.enter("d", "d", 5.0)

    assert policy.next_action(5.0) == Action("unload", "c")
    assert policy.next_action(5.1) is None
    policy.unloaded("c")
    assert load(policy, "d", 5.3).keys() == {"d"}
    assert policy.state_of("a") == "ready"


def test_a_small_engine_is_spared_where_a_larger_one_goes_anyway() -> None:
    """When the longest unused is not enough by itself and the next one is, only the next one goes."""
    policy = make_policy(100, A, C, B)
    for name, now_s in (("c", 0.0), ("a", 1.0)):
        policy.enter(name, name, now_s)
        (lease,) = load(policy, name, now_s).values()
        policy.leave(lease, now_s)

    policy.enter("b", "b", 5.0)

    assert policy.next_action(5.0) == Action("unload", "a")
    assert policy.next_action(5.0) is None
    policy.unloaded("a")
    assert load(policy, "b", 6.0).keys() == {"b"}


def test_an_engine_in_use_is_never_unloaded_and_the_other_gets_a_retry_hint() -> None:
    """The budget holds one, it is busy: the other's request waits as long as it may, then hears why and when."""
    policy = make_policy(100, A, B, max_wait_s=10.0)
    policy.enter("a", "a", 0.0)
    (lease,) = load(policy, "a", 1.0).values()

    policy.enter("b", "b", 2.0)
    assert policy.next_action(11.9) is None
    assert policy.expired(11.9) == {}
    assert policy.next_wakeup_s(3.0) == 12.0
    (error,) = policy.expired(12.0).values()

    assert isinstance(error, OverloadedError)
    assert "within 10 s (no room beside a" in str(error)
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    policy.leave(lease, 13.0)
    assert policy.next_action(14.0) is None  # nobody waits any more, so nobody has to go


def test_pinned_engines_load_first_and_stay() -> None:
    """They load without a request and are no victims; the rest of the budget is what others share."""
    policy = make_policy(100, ManagedEngine("p", 40, is_pinned=True), A, idle_unload_s=5.0)

    load(policy, "p", 0.0)
    policy.enter("a", "a", 1.0)
    (lease,) = load(policy, "a", 1.0).values()
    policy.leave(lease, 2.0)

    assert policy.next_action(7.0) == Action("unload", "a")
    policy.unloaded("a")
    assert policy.next_action(1000.0) is None
    assert policy.state_of("p") == "ready"


@pytest.mark.parametrize(
    "engines", [(ManagedEngine("p", 101, is_pinned=True),), (ManagedEngine("p", 50, is_pinned=True), A)]
)
def test_what_can_never_fit_is_refused_at_once(engines: tuple[ManagedEngine, ...]) -> None:
    """A budget too small for the pinned, or for one engine beside them, is a configuration error."""
    with pytest.raises(ConfigurationError, match="memory_budget"):
        make_policy(100, *engines)


def test_a_load_that_fails_is_told_and_not_repeated_at_once() -> None:
    """Those who wait get the reason; requests within the pause get it with a hint; then it is tried again."""
    policy = make_policy(100, A, failure_pause_s=10.0)
    policy.enter("a", "first", 0.0)
    policy.next_action(0.0)

    (error,) = policy.failed("a", "no such file.", 1.0).values()

    assert isinstance(error, EngineUnavailableError)
    assert str(error) == "the engine `a` did not load: no such file."
    with pytest.raises(OverloadedError, match=r"no such file\. Retry in about 9 s") as caught:
        policy.enter("a", "second", 2.0)
    assert caught.value.retry_after_s == 9.0
    assert policy.enter("a", "third", 11.0) is None
    assert policy.next_action(11.0) == Action("load", "a")


def test_too_many_waiting_are_refused_with_a_hint() -> None:
    """A cold engine cannot fill the front door with waiting requests."""
    policy = make_policy(100, A, max_waiting=2)
    policy.enter("a", "1", 0.0)
    policy.enter("a", "2", 0.0)

    with pytest.raises(OverloadedError, match="2 requests wait"):
        policy.enter("a", "3", 0.0)


def test_giving_up_leaves_no_trace() -> None:
    """A client that leaves while its engine loads holds nothing when it is loaded."""
    policy = make_policy(100, A, B)
    policy.enter("a", "gone", 0.0)
    policy.next_action(0.0)
    policy.give_up("gone")

    assert policy.loaded("a", 1.0) == {}
    policy.enter("b", "b", 2.0)
    assert policy.next_action(2.0) == Action("unload", "a")


def test_a_lost_engine_is_cleared_and_its_leases_are_void() -> None:
    """What holds a lease on an engine that died holds nothing of the engine that comes after it."""
    policy = make_policy(100, A)
    policy.enter("a", "a", 0.0)
    (old,) = load(policy, "a", 0.0).values()

    assert policy.lost("a", 1.0) == Action("clear", "a")
    assert policy.lost("a", 1.0) is None
    policy.enter("a", "b", 1.5)
    policy.unloaded("a")
    (new,) = load(policy, "a", 2.0).values()
    policy.leave(old, 3.0)

    assert policy.is_only_lease(new)
    assert not policy.is_only_lease(old)


def test_taking_an_engine_out_of_service_waits_for_its_requests() -> None:
    """Requests in flight end in peace, new and waiting ones are refused, then it is unloaded and forgotten."""
    policy = make_policy(200, A, B)
    policy.enter("a", "a", 0.0)
    (lease,) = load(policy, "a", 0.0).values()
    policy.enter("b", "b", 0.0)

    gone = policy.configure(ResidencyLimits(200), [])

    assert list(gone) == ["b"]
    assert not policy.manages("b")
    with pytest.raises(EngineUnavailableError, match="taken out"):
        policy.enter("a", "late", 1.0)
    assert policy.next_action(1.0) is None
    policy.leave(lease, 2.0)
    assert policy.next_action(2.0) == Action("unload", "a")
    policy.unloaded("a")
    assert not policy.manages("a")


def test_a_smaller_budget_sheds_what_is_idle() -> None:
    """After the budget shrank, or engines were loaded by hand, idle ones go until it holds."""
    policy = make_policy(200, A, B)
    for name, now_s in (("a", 0.0), ("b", 1.0)):
        policy.loaded(name, now_s)

    policy.configure(ResidencyLimits(100), [A, B])

    assert policy.next_action(2.0) == Action("unload", "a")
    assert policy.next_action(2.0) is None


@pytest.mark.parametrize("seed", range(60))
def test_the_policy_agrees_with_the_oracle(seed: int) -> None:
    """Random traffic, failures, deaths and clients that leave: budget, leases, victims and waits are as recomputed."""
    simulation = Simulation(seed)

    simulation.run(250)

    assert simulation.policy.num_resident_bytes <= simulation.limits.memory_budget_bytes
