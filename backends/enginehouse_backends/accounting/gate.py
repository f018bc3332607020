"""Admission: holding requests against budgets, and freeing what they did not use.

A request holds its upper bound against every window it falls in, by one conditional UPDATE each, so that requests at a
budget's edge are admitted only as far as they fit, from however many processes. Its settlement frees the rest. Windows
are those of the reservation's time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import and_, bindparam, case, delete, func, select, update

from enginehouse_backends.accounting.budgets import MEASURES, Budget
from enginehouse_backends.accounting.records import MAX_BIGINT
from enginehouse_backends.accounting.schema import budget_windows, budgets, entries, holds
from enginehouse_backends.accounting.upsert import insert_new
from enginehouse_backends.accounting.windows import NS_PER_S, Window, format_moment, parse_time_zone
from enginehouse_contract.errors import BudgetExceededError, refusal
from enginehouse_contract.money import format_amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection

    from enginehouse_backends.accounting.records import Reservation
    from enginehouse_contract.money import Pico

_KEEP_WINDOWS_NS: Final = 2 * 24 * 3600 * NS_PER_S  # a settled window is dropped when it ended this long ago


class WindowKey(NamedTuple):
    """What a row of ``budget_windows`` is known by."""

    tenant: str
    key_id: str
    window: str
    start_ns: int


_BUDGETS_OF: Final = select(budgets).where(budgets.c.tenant.in_(bindparam("tenants", expanding=True)))
_W: Final = budget_windows.c
_THIS_WINDOW: Final = and_(*(_W[name] == bindparam(f"of_{name}") for name in WindowKey._fields))


def _fits(counted: Any, more: str, limit: str) -> Any:
    return counted + bindparam(more, type_=counted.type) <= bindparam(limit, type_=counted.type)


_ADD: Final = {
    "held": _W.held + bindparam("amount", type_=_W.held.type),
    "num_requests": _W.num_requests + bindparam("requests", type_=_W.num_requests.type),
    "num_tokens": _W.num_tokens + bindparam("tokens", type_=_W.num_tokens.type),
}
_HOLD: Final = (
    update(budget_windows)
    .where(
        _THIS_WINDOW,
        _fits(_W.spent + _W.held, "amount", "max_spend"),
        _fits(_W.num_requests, "requests", "max_requests"),
        _fits(_W.num_tokens, "tokens", "max_tokens"),
    )
    .values(_ADD)
    .returning(_W.spent, _W.held, _W.num_requests, _W.num_tokens)
)
_PUT_BACK: Final = update(budget_windows).where(_THIS_WINDOW).values(_ADD)
_SETTLE: Final = (
    update(budget_windows)
    .where(
        _W.tenant == bindparam("of_tenant"),
        _W.key_id.in_(("", bindparam("of_key_id"))),
        _W.start_ns <= bindparam("of_time_ns"),
        _W.end_ns > bindparam("of_time_ns"),
    )
    .values({**_ADD, "spent": _W.spent + bindparam("spent", type_=_W.spent.type)})
)


class _Window(NamedTuple):
    """A budget in the window of now, with the parameters that stay the same for every reservation."""

    budget: Budget
    now: Window
    parameters: dict[str, Any]


class Gate:
    """Admits reservations against budgets, inside one transaction of the ledger."""

    def __init__(self, connection: Connection, reservations: Iterable[Reservation], at_ns: int) -> None:
        self._connection = connection
        self._at_ns = at_ns
        tenants = sorted({reservation.tenant for reservation in reservations})
        rows = connection.execute(_BUDGETS_OF, {"tenants": tenants})
        limits = sorted(map(Budget.from_row, rows), key=lambda budget: (budget.tenant, budget.key_id, budget.window))
        windows = [(budget, budget.window_at(at_ns)) for budget in limits]
        _open_windows(connection, windows, at_ns)
        self._windows: dict[str, list[_Window]] = defaultdict(list)
        for budget, now in windows:
            key = {f"of_{name}": value for name, value in _key(budget, now)._asdict().items()}
            self._windows[budget.tenant].append(_Window(budget, now, {**key, **_hard_limits(budget)}))

    def admit(self, reservation: Reservation, amount: Pico | None) -> tuple[str, ...]:
        """Hold a request's upper bound against every window it falls in; return the soft limits that are passed.

        Raises:
            BudgetExceededError: A hard limit has no room, or limits spend on a model without a price; nothing is held.
        """
        num_tokens = reservation.upper_bound.num_input_tokens + reservation.upper_bound.num_output_tokens
        wanted = {"amount": amount or 0, "requests": 1, "tokens": num_tokens}
        passed: list[str] = []
        held: list[_Window] = []
        for window in self._windows.get(reservation.tenant, ()):
            if window.budget.key_id not in {"", reservation.key_id}:
                continue
            try:
                if reservation.enforce_limits and amount is None and window.budget.spend.hard is not None:
                    raise _unpriced(window.budget)
                passed.extend(self._hold(window, wanted, enforce=reservation.enforce_limits))
            except BudgetExceededError:
                back = {name: -value for name, value in wanted.items()}
                for other in held:
                    self._connection.execute(_PUT_BACK, {**other.parameters, **back})
                raise
            held.append(window)
        return tuple(passed)

    def _hold(self, window: _Window, wanted: dict[str, int], *, enforce: bool) -> list[str]:
        budget = window.budget
        limits = {} if enforce else _NO_LIMITS
        counts = self._connection.execute(_HOLD, {**window.parameters, **wanted, **limits}).one_or_none()
        if counts is None:
            raise self._exceeded(window, wanted)
        used = {"spend": counts.spent + counts.held, "requests": counts.num_requests, "tokens": counts.num_tokens}
        return [
            f"{_limit_name(budget, name)} is {_quantity(name, used[name])}, over its soft limit {_quantity(name, soft)}"
            for name in MEASURES
            if (soft := budget.limit(name).soft) is not None and used[name] > soft
        ]

    def _exceeded(self, window: _Window, wanted: dict[str, int]) -> BudgetExceededError:
        """Word the refusal: which limit, what is left, what was asked, and when it resets."""
        budget, end_ns = window.budget, window.now.end_ns
        query = select(_W.spent + _W.held, _W.num_requests, _W.num_tokens).where(_THIS_WINDOW)
        used = dict(zip(MEASURES, self._connection.execute(query, window.parameters).one(), strict=True))
        asked = {"spend": wanted["amount"], "requests": wanted["requests"], "tokens": wanted["tokens"]}
        name, hard = next(
            (name, hard)
            for name in MEASURES
            if (hard := budget.limit(name).hard) is not None and used[name] + asked[name] > hard
        )
        left = _quantity(name, max(0, hard - used[name]))
        moment = format_moment(end_ns, parse_time_zone(budget.time_zone))
        problem = f"is used up: {_limit_name(budget, name)} has {left} left and resets at {moment}"
        message = refusal("budget", problem, limit=_quantity(name, hard), given=_quantity(name, asked[name]))
        return BudgetExceededError(message, retry_after_s=(end_ns - self._at_ns) / NS_PER_S)


_NO_LIMITS: Final = {f"max_{name}": MAX_BIGINT for name in MEASURES}


def _hard_limits(budget: Budget) -> dict[str, int]:
    limits = {f"max_{name}": budget.limit(name).hard for name in MEASURES}
    return {name: MAX_BIGINT if value is None else value for name, value in limits.items()}


def _unpriced(budget: Budget) -> BudgetExceededError:
    problem = f"has no price, and tenant {budget.tenant} has a limit on spend per {budget.window}"
    return BudgetExceededError(refusal("model", problem))


class Change(NamedTuple):
    """What a settlement, a release or a reversal changes in the windows of its reservation."""

    tenant: str
    key_id: str
    reserved_at_ns: int
    spent: int
    held: int
    num_requests: int
    num_tokens: int


def change_windows(connection: Connection, changes: Sequence[Change]) -> None:
    """Apply changes to the windows they fall in; tenants without budgets cost one look."""
    tenants = sorted({change.tenant for change in changes})
    limited = {row.tenant for row in connection.execute(_BUDGETS_OF, {"tenants": tenants})}
    rows = [
        {
            "of_tenant": change.tenant,
            "of_key_id": change.key_id,
            "of_time_ns": change.reserved_at_ns,
            "spent": change.spent,
            "amount": change.held,
            "requests": change.num_requests,
            "tokens": change.num_tokens,
        }
        for change in sorted(changes)
        if change.tenant in limited
    ]
    if rows:
        connection.execute(_SETTLE, rows)


def _key(budget: Budget, window: Window) -> WindowKey:
    return WindowKey(budget.tenant, budget.key_id, budget.window, window.start_ns)


_LOCK_WINDOWS: Final = (
    select(_W.tenant, _W.key_id, _W.window, _W.start_ns)
    .where(
        _W.tenant.in_(bindparam("tenants", expanding=True)),
        _W.start_ns <= bindparam("at_ns"),
        _W.end_ns > bindparam("at_ns"),
    )
    .order_by(_W.tenant, _W.key_id, _W.window, _W.start_ns)
    .with_for_update()
)
"""In one order, so that batches of several processes cannot deadlock (SQLite has one writer at a time anyway)."""


def _open_windows(connection: Connection, windows: Sequence[tuple[Budget, Window]], at_ns: int) -> None:
    """Make sure the rows of the current windows exist, and lock them."""
    if not windows:
        return
    tenants = sorted({budget.tenant for budget, _ in windows})
    known = {WindowKey(*row) for row in connection.execute(_LOCK_WINDOWS, {"tenants": tenants, "at_ns": at_ns})}
    for budget, window in windows:
        if (key := _key(budget, window)) not in known:
            row = {**key._asdict(), "end_ns": window.end_ns, **_used(connection, budget, window)}
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
