"""The queue in front of an engine: bounded, fair between tenants, never starving.

Fair share is the virtual token counter of Sheng et al. 2024 ("Fairness in Serving Large Language Models", algorithm 1):
each tenant carries a counter of the service it received; the tenant with the smallest goes next; one that comes back
after being away is lifted to the smallest counter among those present, so that it cannot save up. Priorities rank above
fairness, and age: a request that has waited ``aging_s`` counts as one of the highest priority.

Not thread-safe and free of clocks: the caller holds a lock and passes the time, in seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from enginehouse_contract.errors import OverloadedError

T = TypeVar("T")

OUTPUT_TOKEN_WEIGHT: Final = 2.0
"""Service of an output token in input tokens (the weights of the VTC paper's evaluation)."""

_DEFAULT_PRIORITY: Final = 0
_HIGHEST_PRIORITY: Final = 1
_RATE_MEMORY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may run and wait at once."""

    max_active: int
    max_waiting: int
    aging_s: float = 10.0


@dataclass(slots=True)
class Ticket(Generic[T]):
    """One request in the queue or running."""

    item: T
    tenant: str
    priority: int  # 1 = highest, larger = later, 0 = default, after all stated ones
    num_input_tokens: int
    arrived_s: float
    deadline_s: float = math.inf
    is_active: bool = False


@dataclass(slots=True)
class _Tenant:
    counter: float = 0.0
    num_active: int = 0
    waiting: dict[int, deque[Ticket[object]]] = field(default_factory=dict)  # by priority, oldest first

    @property
    def is_present(self) -> bool:
        return self.num_active > 0 or bool(self.waiting)


class FairQueue(Generic[T]):
    """Admits tickets while ``max_active`` allows; see the module's docstring for the order."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._tenants: dict[str, _Tenant] = {}
        self._num_waiting = 0
        self._num_active = 0
        self._completions: deque[float] = deque()

    @property
    def num_waiting(self) -> int:
        """Tickets that wait."""
        return self._num_waiting

    @property
    def num_active(self) -> int:
        """Tickets that were admitted and not finished."""
        return self._num_active

    def enter(self, ticket: Ticket[T], now_s: float) -> None:
        """Queue a ticket.

        Raises :class:`OverloadedError` with a retry hint when ``max_waiting`` tickets wait and none could start.
        """
        has_room = self._num_active < self.limits.max_active
        if not has_room and self._num_waiting >= self.limits.max_waiting:
            retry_after_s = self._retry_after_s(now_s)
            msg = (
                f"the server is full: {self._num_active} requests running, {self._num_waiting} waiting "
                f"(limits {self.limits.max_active} and {self.limits.max_waiting}). "
                f"Retry in about {retry_after_s:.0f} s."
            )
            raise OverloadedError(msg, retry_after_s=retry_after_s)
        tenant = self._tenants.setdefault(ticket.tenant, _Tenant())
        if not tenant.is_present:
            present = [other.counter for other in self._tenants.values() if other.is_present]
            tenant.counter = max(tenant.counter, min(present, default=tenant.counter))
        tenant.waiting.setdefault(ticket.priority, deque()).append(ticket)  # type: ignore[arg-type] # deques are invariant
        self._num_waiting += 1

    def admit(self, now_s: float) -> Ticket[T] | None:
        """Take the next ticket out of the queue and count it as active; None when nothing may start now."""
        if self._num_active >= self.limits.max_active or self._num_waiting == 0:
            return None
        _, _, _, name, level = min(
            (*self._rank(queue[0], now_s), name, level)
            for name, tenant in self._tenants.items()
            for level, queue in tenant.waiting.items()
        )
        ticket = self._tenants[name].waiting[level][0]
        self._remove_waiting(ticket)
        tenant = self._tenants[name]
        tenant.num_active += 1
        tenant.counter += ticket.num_input_tokens
        ticket.is_active = True
        self._num_active += 1
        return ticket  # type: ignore[return-value] # every ticket entered as Ticket[T]

    def charge_output(self, tenant: str, num_output_tokens: int) -> None:
        """Add generated tokens to a tenant's counter, as they are generated."""
        self._tenants[tenant].counter += OUTPUT_TOKEN_WEIGHT * num_output_tokens

    def leave(self, ticket: Ticket[T], now_s: float) -> None:
        """Take a ticket out for good: finished if it was active, given up if it was waiting."""
        tenant = self._tenants[ticket.tenant]
        if ticket.is_active:
            tenant.num_active -= 1
            self._num_active -= 1
            self._completions.append(now_s)
        else:
            self._remove_waiting(ticket)
        if not tenant.is_present and len(self._tenants) > 1:
            self._forget_absent_tenants()

    def expired(self, now_s: float) -> list[Ticket[T]]:
        """Return the waiting tickets whose deadline has passed; they still have to :meth:`leave`."""
        return [
            ticket  # type: ignore[misc] # every ticket entered as Ticket[T]
            for tenant in self._tenants.values()
            for queue in tenant.waiting.values()
            for ticket in queue
            if ticket.deadline_s <= now_s
        ]

    def _rank(self, ticket: Ticket[object], now_s: float) -> tuple[float, float, float]:
        """Smaller goes first: priority class, then the tenant's counter, then age."""
        level = math.inf if ticket.priority == _DEFAULT_PRIORITY else float(ticket.priority)
        if now_s - ticket.arrived_s >= self.limits.aging_s:
            level = float(_HIGHEST_PRIORITY)
        return level, self._tenants[ticket.tenant].counter, ticket.arrived_s

    def _remove_waiting(self, ticket: Ticket[T] | Ticket[object]) -> None:
        waiting = self._tenants[ticket.tenant].waiting
        waiting[ticket.priority].remove(ticket)  # type: ignore[arg-type] # deques are invariant
        if not waiting[ticket.priority]:
            del waiting[ticket.priority]
        self._num_waiting -= 1

    def _forget_absent_tenants(self) -> None:
        """Drop absent tenants that owe nothing: a counter at or under the minimum would be lifted to it anyway."""
        present = [tenant.counter for tenant in self._tenants.values() if tenant.is_present]
        floor = min(present, default=math.inf)
        self._tenants = {
            name: tenant for name, tenant in self._tenants.items() if tenant.is_present or tenant.counter > floor
        }

    def _retry_after_s(self, now_s: float) -> float:
        """Estimate when a place in the queue comes free, from the completions of the last half minute."""
        while self._completions and self._completions[0] < now_s - _RATE_MEMORY_S:
            self._completions.popleft()
        if not self._completions:
            return 1.0
        rate = len(self._completions) / _RATE_MEMORY_S
        return min(max(1.0, 1.0 / rate), _RATE_MEMORY_S)
