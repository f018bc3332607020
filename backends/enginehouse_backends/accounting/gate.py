"""Admission: holding requests against budgets.

A request holds its upper bound against every window it falls in, by one conditional UPDATE each, so that requests at a
budget's edge are admitted only as far as they fit, from however many processes. Its settlement frees the rest
(`charges.py`).
"""

from __future__ import annotations

from collections import defaultdict
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


class _Window(NamedTuple):
    """A budget in the window of now, with the parameters that stay the same for every reservation."""

    budget: Budget
    now: Window
    parameters: dict[str, Any]

    @property
    def key(self) -> WindowKey:
        """The key of its row."""
        return WindowKey(self.budget.tenant, self.budget.key_id, self.budget.window, self.now.start_ns)

    @classmethod
    def of(cls, budget: Budget, at_ns: int) -> _Window:
        """Return the window of a budget that holds a moment."""
        bare = cls(budget, budget.window_at(at_ns), {})
        return bare._replace(parameters={f"of_{name}": value for name, value in bare.key._asdict().items()})

    def binds(self, reservation: Reservation) -> bool:
        """Whether the budget counts this request of its tenant."""
        return self.budget.key_id in {"", reservation.key_id}


class Priced(NamedTuple):
    """A reservation and the price of its upper bound; None: no price."""

    reservation: Reservation
    amount: Pico | None


class Gate:
    """Admits reservations against budgets, inside one transaction of the ledger."""

    def __init__(self, connection: Connection, budgets: BudgetsByTenant, at_ns: int) -> None:
        self._connection = connection
        self._at_ns = at_ns
        self._windows: dict[str, list[_Window]] = {
            tenant: [_Window.of(budget, at_ns) for budget in members] for tenant, members in budgets.items()
        }
        _open_windows(connection, [window for members in self._windows.values() for window in members], at_ns)

    def admit(self, requests: Sequence[Priced]) -> list[tuple[str, ...] | BudgetExceededError]:
        """Hold each request's upper bound against every window it falls in, in their order.

        Returns:
            For each request the sentences of the soft limits that are passed, or why nothing was held for it: a hard
            limit has no room, or limits spend on a model without a price.
        """
        outcomes: list[tuple[str, ...] | BudgetExceededError] = [()] * len(requests)
        by_tenant: dict[str, list[int]] = defaultdict(list)
        for position, request in enumerate(requests):
            if request.reservation.tenant in self._windows:
                by_tenant[request.reservation.tenant].append(position)
        for tenant, positions in by_tenant.items():
            if len(positions) > 1 and self._hold_together(tenant, [requests[position] for position in positions]):
                continue
            for position in positions:
                outcomes[position] = self._admit_one(tenant, requests[position])
        return outcomes

    def _hold_together(self, tenant: str, requests: Sequence[Priced]) -> bool:
        """Hold all at once where none meets a limit, soft or hard: far from the edge, one statement does for many."""
        held: list[tuple[_Window, dict[str, int]]] = []
        for window in self._windows[tenant]:
            bound = [request for request in requests if window.binds(request.reservation)]
            wanted = _sum_of(bound)
            counts = self._hold(window, wanted, _hard_limits(window.budget))
            if counts is not None:
                held.append((window, wanted))
            has_price = window.budget.spend.hard is None or all(request.amount is not None for request in bound)
            if counts is None or not has_price or _passed(window.budget, counts):
                self._put_back(held)
                return False
        return True

    def _admit_one(self, tenant: str, request: Priced) -> tuple[str, ...] | BudgetExceededError:
        wanted = _sum_of([request])
        enforce = request.reservation.enforce_limits
        passed: list[str] = []
        held: list[tuple[_Window, dict[str, int]]] = []
        for window in self._windows[tenant]:
            if not window.binds(request.reservation):
                continue
            if enforce and request.amount is None and window.budget.spend.hard is not None:
                self._put_back(held)
                return _unpriced(window.budget)
            counts = self._hold(window, wanted, _hard_limits(window.budget) if enforce else _NO_LIMITS)
            if counts is None:
                self._put_back(held)
                return self._exceeded(window, wanted)
            held.append((window, wanted))
            passed.extend(_passed(window.budget, counts))
        return tuple(passed)

    def _hold(self, window: _Window, wanted: dict[str, int], limits: dict[str, int]) -> dict[str, int] | None:
        """Add to a window what fits; return what it then counts, None when it does not fit."""
        row = self._connection.execute(_HOLD, {**window.parameters, **wanted, **limits}).one_or_none()
        if row is None:
            return None
        return {"spend": row.spent + row.held, "requests": row.num_requests, "tokens": row.num_tokens}

    def _put_back(self, held: Sequence[tuple[_Window, dict[str, int]]]) -> None:
        for window, wanted in held:
            self._connection.execute(_PUT_BACK, {**window.parameters, **{name: -n for name, n in wanted.items()}})

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


def _sum_of(requests: Iterable[Priced]) -> dict[str, int]:
    """What requests add to a window."""
    amount = num_requests = num_tokens = 0
    for request in requests:
        bound = request.reservation.upper_bound
        amount += request.amount or 0
        num_requests += 1
        num_tokens += bound.num_input_tokens + bound.num_output_tokens
    return {"amount": amount, "requests": num_requests, "tokens": num_tokens}


def _passed(budget: Budget, used: dict[str, int]) -> list[str]:
    """A sentence for each soft limit that is passed."""
    return [
        f"{_limit_name(budget, name)} is {_quantity(name, used[name])}, over its soft limit {_quantity(name, soft)}"
        for name in MEASURES
        if (soft := budget.limit(name).soft) is not None and used[name] > soft
    ]


def _unpriced(budget: Budget) -> BudgetExceededError:
    problem = f"has no price, and tenant {budget.tenant} has a limit on spend per {budget.window}"
    return BudgetExceededError(refusal("model", problem))


_FIND_WINDOWS: Final = select(_W.tenant, _W.key_id, _W.window, _W.start_ns).where(
    _W.tenant.in_(bindparam("tenants", expanding=True)),
    _W.start_ns <= bindparam("at_ns"),
    _W.end_ns > bindparam("at_ns"),
)


def _open_windows(connection: Connection, windows: Sequence[_Window], at_ns: int) -> None:
    """Make sure the rows of the current windows exist, and drop those that are long over."""
    if not windows:
        return
    tenants = sorted({window.budget.tenant for window in windows})
    known = {WindowKey(*row) for row in connection.execute(_FIND_WINDOWS, {"tenants": tenants, "at_ns": at_ns})}
    for window in windows:
        if window.key not in known:
            used = _used(connection, window.budget, window.now)
            insert_new(connection, budget_windows, {**window.key._asdict(), "end_ns": window.now.end_ns, **used})
            connection.execute(
                delete(budget_windows).where(
                    _W.tenant == window.budget.tenant,
                    _W.key_id == window.budget.key_id,
                    _W.window == window.budget.window,
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
