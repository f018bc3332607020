"""Admission: holding requests against budgets.

A request holds its upper bound against every window it falls in; its settlement frees the rest (`charges.py`). The
windows of a batch are read once, under the lock of their tenants' budgets, requests are admitted in their order, and
each window is written by one UPDATE that repeats the condition. So requests at a budget's edge are admitted exactly as
far as they fit, from however many processes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import and_, bindparam, case, delete, func, select, update

from enginehouse_backends.accounting.budgets import MEASURES, Budget, BudgetsByTenant
from enginehouse_backends.accounting.records import MAX_BIGINT
from enginehouse_backends.accounting.schema import budget_windows, entries, holds
from enginehouse_backends.accounting.upsert import insert_new
from enginehouse_backends.accounting.windows import NS_PER_S, Window, format_moment, parse_time_zone
from enginehouse_contract.errors import BudgetExceededError, refusal
from enginehouse_contract.money import format_amount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from enginehouse_backends.accounting.records import Reservation
    from enginehouse_contract.money import Pico

_KEEP_WINDOWS_NS: Final = 2 * 24 * 3600 * NS_PER_S  # a settled window is dropped when it ended this long ago


class Priced(NamedTuple):
    """A reservation and the price of its upper bound; None: no price."""

    reservation: Reservation
    amount: Pico | None


class WindowKey(NamedTuple):
    """What a row of ``budget_windows`` is known by."""

    tenant: str
    key_id: str
    window: str
    start_ns: int


_W: Final = budget_windows.c
_FIND_WINDOWS: Final = select(budget_windows).where(
    _W.tenant.in_(bindparam("tenants", expanding=True)),
    _W.start_ns <= bindparam("at_ns"),
    _W.end_ns > bindparam("at_ns"),
)


def _plus(counted: Any, more: str) -> Any:
    return counted + bindparam(more, type_=counted.type)


_HOLD: Final = (
    update(budget_windows)
    .where(
        *(_W[name] == bindparam(f"of_{name}") for name in WindowKey._fields),
        and_(
            _plus(_W.spent + _W.held, "spend") <= bindparam("max_spend", type_=_W.held.type),
            _plus(_W.num_requests, "requests") <= bindparam("max_requests", type_=_W.held.type),
            _plus(_W.num_tokens, "tokens") <= bindparam("max_tokens", type_=_W.held.type),
        ),
    )
    .values(
        held=_plus(_W.held, "spend"),
        num_requests=_plus(_W.num_requests, "requests"),
        num_tokens=_plus(_W.num_tokens, "tokens"),
    )
)


@dataclass(slots=True)
class _OpenWindow:
    """A budget's window of now, what it counts, and what this batch adds to it."""

    budget: Budget
    now: Window
    used: dict[str, int]
    added: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEASURES, 0))
    is_enforced: bool = True

    def refuse(self, wanted: dict[str, int], *, has_price: bool, at_ns: int) -> BudgetExceededError | None:
        """Word why a request does not fit: which limit, what is left, what was asked, and when it resets."""
        if not has_price and self.budget.spend.hard is not None:
            problem = f"has no price, and tenant {self.budget.tenant} has a limit on spend per {self.budget.window}"
            return BudgetExceededError(refusal("model", problem))
        for name in MEASURES:
            hard = self.budget.limit(name).hard
            if hard is None or self.used[name] + self.added[name] + wanted[name] <= hard:
                continue
            left = _quantity(name, max(0, hard - self.used[name] - self.added[name]))
            moment = format_moment(self.now.end_ns, parse_time_zone(self.budget.time_zone))
            problem = f"is used up: {_limit_name(self.budget, name)} has {left} left and resets at {moment}"
            message = refusal("budget", problem, limit=_quantity(name, hard), given=_quantity(name, wanted[name]))
            return BudgetExceededError(message, retry_after_s=(self.now.end_ns - at_ns) / NS_PER_S)
        return None

    def add(self, wanted: dict[str, int]) -> list[str]:
        """Count a request; return a sentence for each soft limit that is passed."""
        passed = []
        for name in MEASURES:
            self.added[name] += wanted[name]
            soft, used = self.budget.limit(name).soft, self.used[name] + self.added[name]
            if soft is not None and used > soft:
                limit = _limit_name(self.budget, name)
                passed.append(f"{limit} is {_quantity(name, used)}, over its soft limit {_quantity(name, soft)}")
        return passed

    def to_update(self) -> dict[str, Any]:
        """Return the parameters of the UPDATE that writes what was added."""
        limits = {f"max_{name}": self.budget.limit(name).hard if self.is_enforced else None for name in MEASURES}
        return {
            **{f"of_{name}": value for name, value in _key(self.budget, self.now)._asdict().items()},
            **self.added,
            **{name: MAX_BIGINT if value is None else value for name, value in limits.items()},
        }


class Gate:
    """Admits reservations against budgets, inside one transaction that has locked them."""

    def __init__(self, connection: Connection, budgets: BudgetsByTenant, at_ns: int) -> None:
        self._connection = connection
        self._at_ns = at_ns
        self._windows = _open_windows(connection, budgets, at_ns) if budgets else {}

    def admit(self, requests: Sequence[Priced]) -> list[tuple[str, ...] | BudgetExceededError]:
        """Hold each request's upper bound against every window it falls in, in their order.

        Returns:
            For each request the sentences of the soft limits that are passed, or why nothing was held for it: a hard
            limit has no room, or limits spend on a model without a price.
        """
        outcomes = [self._admit_one(request) for request in requests]
        changed = [window for members in self._windows.values() for window in members if any(window.added.values())]
        if changed:
            written = self._connection.execute(_HOLD, [window.to_update() for window in changed])
            if written.rowcount != len(changed):
                raise RuntimeError("a budget's window changed although its budget was locked")
        return outcomes

    def _admit_one(self, request: Priced) -> tuple[str, ...] | BudgetExceededError:
        reservation, amount = request
        windows = [
            window
            for window in self._windows.get(reservation.tenant, ())
            if window.budget.key_id in {"", reservation.key_id}
        ]
        bound = reservation.upper_bound
        wanted = {"spend": amount or 0, "requests": 1, "tokens": bound.num_input_tokens + bound.num_output_tokens}
        for window in windows:
            if not reservation.enforce_limits:
                window.is_enforced = False
            elif refused := window.refuse(wanted, has_price=amount is not None, at_ns=self._at_ns):
                return refused
        return tuple(sentence for window in windows for sentence in window.add(wanted))


def _key(budget: Budget, window: Window) -> WindowKey:
    return WindowKey(budget.tenant, budget.key_id, budget.window, window.start_ns)


def _open_windows(connection: Connection, budgets: BudgetsByTenant, at_ns: int) -> dict[str, list[_OpenWindow]]:
    """Read the windows of now, making those that are not there yet, and dropping those that are long over."""
    found = connection.execute(_FIND_WINDOWS, {"tenants": sorted(budgets), "at_ns": at_ns})
    known = {WindowKey(row.tenant, row.key_id, row.window, row.start_ns): row._asdict() for row in found}
    windows: dict[str, list[_OpenWindow]] = defaultdict(list)
    for budget in (budget for members in budgets.values() for budget in members):
        now = budget.window_at(at_ns)
        key = _key(budget, now)
        row = known.get(key)
        if row is None:
            row = {**key._asdict(), "end_ns": now.end_ns, **_used(connection, budget, now)}
            insert_new(connection, budget_windows, row)
            connection.execute(
                delete(budget_windows).where(
                    _W.tenant == budget.tenant,
                    _W.key_id == budget.key_id,
                    _W.window == budget.window,
                    _W.end_ns < at_ns - _KEEP_WINDOWS_NS,
                    _W.held == 0,
                )
            )
        used = {"spend": row["spent"] + row["held"], "requests": row["num_requests"], "tokens": row["num_tokens"]}
        windows[budget.tenant].append(_OpenWindow(budget, now, used))
    return windows


def _used(connection: Connection, budget: Budget, window: Window) -> dict[str, int]:
    """Sum what the entries and the open holds of a window say: not 0 when the budget is younger than the window."""
    totals = {"spent": 0, "held": 0, "num_requests": 0, "num_tokens": 0}
    for table, amount, num_requests, num_tokens in (
        (entries, "spent", func.sum(case((entries.c.kind == "reversal", -1), else_=1)), _billed_tokens()),
        (holds, "held", func.count(), holds.c.num_tokens),
    ):
        query = select(func.sum(table.c.amount), num_requests, func.sum(num_tokens)).where(
            table.c.tenant == budget.tenant,
            table.c.reserved_at_ns >= window.start_ns,
            table.c.reserved_at_ns < window.end_ns,
        )
        if table is entries:
            query = query.where(entries.c.kind.in_(("settlement", "reversal")))
        if budget.key_id:
            query = query.where(table.c.key_id == budget.key_id)
        sums = [int(value or 0) for value in connection.execute(query).one()]
        totals[amount] += sums[0]
        totals["num_requests"] += sums[1]
        totals["num_tokens"] += sums[2]
    return totals


def _billed_tokens() -> Any:
    return entries.c.num_input_uncached_tokens + entries.c.num_input_cached_tokens + entries.c.num_output_tokens


def _limit_name(budget: Budget, measure: str) -> str:
    whose = f"tenant {budget.tenant}" + (f", key {budget.key_id}" if budget.key_id else "")
    return f"{measure} per {budget.window} of {whose}"


def _quantity(measure: str, value: int) -> str:
    return format_amount(value) if measure == "spend" else str(value)
