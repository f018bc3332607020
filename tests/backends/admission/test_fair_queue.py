"""Admission order, bounds and fairness, against a simulation and a slow oracle."""

from __future__ import annotations

import random

import pytest

from enginehouse_backends.admission.fair_queue import OUTPUT_TOKEN_WEIGHT, FairQueue, QueueLimits, Ticket
from enginehouse_contract.errors import OverloadedError


def make_ticket(item: int, tenant: str = "a", priority: int = 0, arrived_s: float = 0.0, **more: float) -> Ticket[int]:
    """Return a ticket with defaults."""
    return Ticket(item, tenant, priority, int(more.pop("num_input_tokens", 10)), arrived_s, **more)


def test_one_tenant_is_served_in_order() -> None:
    """Requests of one tenant and priority start in the order they arrived, as room allows."""
    queue: FairQueue[int] = FairQueue(QueueLimits(max_active=2, max_waiting=10))
    for item in range(4):
        queue.enter(make_ticket(item, arrived_s=item), now_s=item)
    first, second = queue.admit(4), queue.admit(4)

    assert first is not None
    assert second is not None
    assert (first.item, second.item, queue.admit(4)) == (0, 1, None)
    queue.leave(first, 5)
    third = queue.admit(5)
    assert third is not None
    assert third.item == 2


def test_priorities_rank_first_and_the_default_ranks_last() -> None:
    """1 goes before 2, and 0 (default) after every stated priority."""
    queue: FairQueue[int] = FairQueue(QueueLimits(max_active=3, max_waiting=10))
    for item, priority in enumerate([0, 2, 1]):
        queue.enter(make_ticket(item, priority=priority), now_s=0)

    assert [queue.admit(0).item for _ in range(3)] == [2, 1, 0]  # type: ignore[union-attr]


def test_waiting_ages_into_the_highest_priority() -> None:
    """A default request that has waited for the ageing time goes before a fresh request of the highest priority."""
    queue: FairQueue[int] = FairQueue(QueueLimits(max_active=1, max_waiting=10, aging_s=5.0))
    queue.enter(make_ticket(0, arrived_s=0.0), now_s=0.0)
    queue.enter(make_ticket(1, priority=1, arrived_s=6.0), now_s=6.0)
    ticket = queue.admit(6.0)

    assert ticket is not None
    assert ticket.item == 0


def test_overload_is_refused_at_once_with_a_hint() -> None:
    """Beyond the bound a request is refused, with the numbers and a time to retry; a free slot is never refused."""
    queue: FairQueue[int] = FairQueue(QueueLimits(max_active=1, max_waiting=1))
    queue.enter(make_ticket(0), now_s=0)
    ticket = queue.admit(0)
    queue.enter(make_ticket(1), now_s=0)
    with pytest.raises(OverloadedError, match="1 requests running, 1 waiting") as caught:
        queue.enter(make_ticket(2), now_s=0)

    assert caught.value.retry_after_s is not None
    assert ticket is not None
    queue.leave(ticket, 1)
    assert queue.admit(1) is not None
    assert queue.num_waiting == 0


def test_deadlines_of_waiting_requests() -> None:
    """A waiting ticket past its deadline is reported until it leaves."""
    queue: FairQueue[int] = FairQueue(QueueLimits(max_active=1, max_waiting=5))
    queue.enter(make_ticket(0), now_s=0)
    queue.admit(0)
    late = make_ticket(1, deadline_s=2.0)
    queue.enter(late, now_s=0)

    assert queue.expired(1.9) == []
    assert queue.expired(2.0) == [late]
    queue.leave(late, 2.0)
    assert (queue.num_waiting, queue.num_active) == (0, 1)


def test_a_tenant_cannot_save_up_service_while_away() -> None:
    """After an hour of another tenant's work, a newcomer shares from now on and does not take everything."""
    queue: FairQueue[int] = FairQueue(QueueLimits(max_active=1, max_waiting=100))
    for item in range(50):
        queue.enter(make_ticket(item, "busy"), now_s=0)
    for _ in range(40):
        ticket = queue.admit(0)
        assert ticket is not None
        queue.charge_output(ticket.tenant, 50)
        queue.leave(ticket, 0)
    for item in range(100, 110):
        queue.enter(make_ticket(item, "new"), now_s=0)
    order = []
    for _ in range(8):
        ticket = queue.admit(0)
        assert ticket is not None
        order.append(ticket.tenant)
        queue.charge_output(ticket.tenant, 50)
        queue.leave(ticket, 0)

    assert order.count("new") == order.count("busy") == 4


@pytest.mark.parametrize("seed", range(10))
def test_backlogged_tenants_get_equal_service(seed: int) -> None:
    """Two tenants with 10:1 load and random sizes receive service that differs by a bounded amount while both wait.

    The bound is the VTC paper's theorem 4.4: twice the largest service that the running requests can hold.
    """
    rng = random.Random(seed)
    queue: FairQueue[int] = FairQueue(QueueLimits(max_active=4, max_waiting=10_000, aging_s=1e9))
    service = {"heavy": 0.0, "light": 0.0}
    for item in range(1100):
        tenant = "light" if item % 11 == 0 else "heavy"
        queue.enter(make_ticket(item, tenant, num_input_tokens=rng.randrange(1, 100)), now_s=0)
    running: list[tuple[Ticket[int], int]] = []
    largest = 100 + OUTPUT_TOKEN_WEIGHT * 60
    light_waiting = 100
    while light_waiting > 5:
        while (ticket := queue.admit(0)) is not None:
            service[ticket.tenant] += ticket.num_input_tokens
            light_waiting -= ticket.tenant == "light"
            running.append((ticket, rng.randrange(1, 60)))
        index = rng.randrange(len(running))
        ticket, left = running[index]
        queue.charge_output(ticket.tenant, 1)
        service[ticket.tenant] += OUTPUT_TOKEN_WEIGHT
        if left == 1:
            queue.leave(ticket, 0)
            running.pop(index)
        else:
            running[index] = (ticket, left - 1)

        assert abs(service["heavy"] - service["light"]) <= 2 * 4 * largest


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_agree_with_a_naive_queue(seed: int) -> None:
    """Admissions and counters equal those of a queue that keeps flat lists and recomputes everything."""
    rng = random.Random(seed)
    limits = QueueLimits(max_active=3, max_waiting=8, aging_s=20.0)
    queue: FairQueue[int] = FairQueue(limits)
    waiting: list[Ticket[int]] = []
    active: list[Ticket[int]] = []
    counters: dict[str, float] = {}
    for step in range(300):
        now_s = float(step)
        action = rng.random()
        if action < 0.5:
            ticket = make_ticket(
                step, rng.choice("abc"), rng.choice([0, 0, 1, 2]), now_s, num_input_tokens=rng.randrange(9)
            )
            present = {other.tenant for other in waiting + active}
            try:
                queue.enter(ticket, now_s)
            except OverloadedError:
                assert len(active) >= limits.max_active
                assert len(waiting) >= limits.max_waiting
                continue
            if ticket.tenant not in present:
                floor = min((counters[name] for name in present), default=0.0)
                counters[ticket.tenant] = max(counters.get(ticket.tenant, 0.0), floor)
            waiting.append(ticket)
        elif action < 0.8:
            admitted = queue.admit(now_s)
            if len(active) >= limits.max_active or not waiting:
                assert admitted is None
                continue

            def rank(ticket: Ticket[int], now_s: float = now_s) -> tuple[float, float, float]:
                aged = now_s - ticket.arrived_s >= limits.aging_s
                level = 1 if aged else ticket.priority or 99
                return level, counters[ticket.tenant], ticket.arrived_s

            assert admitted is not None
            assert rank(admitted) == min(map(rank, waiting))
            waiting.remove(admitted)
            active.append(admitted)
            counters[admitted.tenant] += admitted.num_input_tokens
        elif active:
            ticket = rng.choice(active)
            queue.charge_output(ticket.tenant, 3)
            counters[ticket.tenant] += 3 * OUTPUT_TOKEN_WEIGHT
            queue.leave(ticket, now_s)
            active.remove(ticket)

        assert (queue.num_waiting, queue.num_active) == (len(waiting), len(active))
