"""Budgets and quotas: what a tenant, or one of its keys, may spend, ask and compute in a window of time.

A request holds its upper bound against every window it falls in, by one conditional UPDATE each, so that requests at a
budget's edge are admitted only as far as they fit, from however many processes. Its settlement frees the rest. Windows
are those of the reservation's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import Row, and_, bindparam, case, delete, func, select, update

from enginehouse_backends.accounting.records import MAX_BIGINT, check_name
from enginehouse_backends.accounting.schema import budget_windows, budgets, entries, holds
from enginehouse_backends.accounting.upsert import insert_new
from enginehouse_backends.accounting.windows import (
    NS_PER_S,
    WINDOW_NAMES,
    Window,
    WindowName,
    format_moment,
    parse_time_zone,
    window_at,
)
from enginehouse_contract.errors import BudgetExceededError, ConfigurationError, refusal
from enginehouse_contract.money import format_amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection

    from enginehouse_backends.accounting.records import Reservation
    from enginehouse_contract.money import Pico

_MEASURES: Final = ("spend", "requests", "tokens")
_KEEP_WINDOWS_NS: Final = 2 * 24 * 3600 * NS_PER_S  # a settled window is dropped when it ended this long ago


@dataclass(frozen=True, slots=True)
class Limit:
    """A soft limit is reported when it is passed, a hard one refuses; None is no limit. Spend is in pico-units."""

    soft: int | None = None
    hard: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one tenant (``key_id`` "" counts all its keys together) in one kind of window."""

    tenant: str
    window: WindowName
    key_id: str = ""
    time_zone: str = "UTC"
    spend: Limit = Limit()
    requests: Limit = Limit()
    tokens: Limit = Limit()  # input and output, whether cached or not

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant)
        check_name("key_id", self.key_id, may_be_empty=True)
        parse_time_zone(self.time_zone)
        if self.window not in WINDOW_NAMES:
            problem = f"must be one of {', '.join(WINDOW_NAMES)}"
            raise ConfigurationError(refusal("window", problem, given=self.window))
        for measure in _MEASURES:
            for strength in ("soft", "hard"):
                value = getattr(self.limit(measure), strength)
                if value is not None and not 0 <= value <= MAX_BIGINT:
                    field = f"{strength}_{measure}"
                    raise ConfigurationError(refusal(field, "is out of range", limit=f"0 to {MAX_BIGINT}", given=value))

    def limit(self, measure: str) -> Limit:
        """Return the limit on spend, requests or tokens."""
        limit = getattr(self, measure)
        assert isinstance(limit, Limit)
        return limit

    def window_at(self, at_ns: int) -> Window:
        """Return the window of this budget that holds a moment."""
        return window_at(self.window, parse_time_zone(self.time_zone), at_ns)

    def to_row(self) -> dict[str, Any]:
        """Return the budget as a row of its table."""
        limits = {
            f"{strength}_{measure}": getattr(self.limit(measure), strength)
            for measure in _MEASURES
            for strength in ("soft", "hard")
        }
        names = {"tenant": self.tenant, "key_id": self.key_id, "window": self.window, "time_zone": self.time_zone}
        return {**names, **limits}

    @classmethod
    def from_row(cls, row: Row[Any]) -> Budget:
        """Read a row of the table."""
        values = row._mapping  # noqa: SLF001 - SQLAlchemy's public name, underscored to keep clear of columns
        limits = {name: Limit(values[f"soft_{name}"], values[f"hard_{name}"]) for name in _MEASURES}
        return cls(values["tenant"], values["window"], values["key_id"], values["time_zone"], **limits)


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


class Gate:
    """Admits reservations against budgets, inside one transaction of the ledger."""

    def __init__(self, connection: Connection, reservations: Iterable[Reservation], at_ns: int) -> None:
        self._connection = connection
        self._at_ns = at_ns
        tenants = sorted({reservation.tenant for reservation in reservations})
        rows = connection.execute(_BUDGETS_OF, {"tenants": tenants})
        self._budgets = [Budget.from_row(row) for row in rows]
        self._budgets.sort(key=lambda budget: (budget.tenant, budget.key_id, budget.window))
        _open_windows(connection, self._budgets, at_ns)

    def admit(self, reservation: Reservation, amount: Pico | None) -> tuple[str, ...]:
        """Hold a request's upper bound against every window it falls in; return the soft limits that are passed.

        Raises:
            BudgetExceededError: A hard limit has no room, or limits spend on a model without a price; nothing is held.
        """
        num_tokens = reservation.upper_bound.num_input_tokens + reservation.upper_bound.num_output_tokens
        wanted = {"amount": amount or 0, "requests": 1, "tokens": num_tokens}
        passed: list[str] = []
        held: list[Budget] = []
        for budget in self._budgets:
            if budget.tenant != reservation.tenant or budget.key_id not in {"", reservation.key_id}:
                continue
            try:
                passed.extend(
                    self._hold(budget, wanted, has_price=amount is not None, enforce=reservation.enforce_limits)
                )
            except BudgetExceededError:
                for other in held:
                    back = {name: -value for name, value in wanted.items()}
                    self._connection.execute(_PUT_BACK, {**self._parameters(other), **back})
                raise
            held.append(budget)
        return tuple(passed)

    def _hold(self, budget: Budget, wanted: dict[str, int], *, has_price: bool, enforce: bool) -> list[str]:
        if enforce and not has_price and budget.spend.hard is not None:
            raise BudgetExceededError(
                refusal("model", f"has no price, and tenant {budget.tenant} has a limit on spend per {budget.window}")
            )
        hard = {f"max_{name}": budget.limit(name).hard if enforce else None for name in _MEASURES}
        limits = {name: MAX_BIGINT if value is None else value for name, value in hard.items()}
        counts = self._connection.execute(_HOLD, {**self._parameters(budget), **wanted, **limits}).one_or_none()
        if counts is None:
            raise self._exceeded(budget, wanted)
        used = {"spend": counts.spent + counts.held, "requests": counts.num_requests, "tokens": counts.num_tokens}
        return [
            f"{_limit_name(budget, name)} is {_quantity(name, used[name])}, over its soft limit {_quantity(name, soft)}"
            for name in _MEASURES
            if (soft := budget.limit(name).soft) is not None and used[name] > soft
        ]

    def _parameters(self, budget: Budget) -> dict[str, Any]:
        key = _key(budget, self._at_ns)
        return {f"of_{name}": value for name, value in zip(WindowKey._fields, key, strict=True)}

    def _exceeded(self, budget: Budget, wanted: dict[str, int]) -> BudgetExceededError:
        """Word the refusal: which limit, what is left, what was asked, and when it resets."""
        query = select(_W.spent + _W.held, _W.num_requests, _W.num_tokens).where(_THIS_WINDOW)
        used = dict(zip(_MEASURES, self._connection.execute(query, self._parameters(budget)).one(), strict=True))
        asked = {"spend": wanted["amount"], "requests": wanted["requests"], "tokens": wanted["tokens"]}
        name, hard = next(
            (name, hard)
            for name in _MEASURES
            if (hard := budget.limit(name).hard) is not None and used[name] + asked[name] > hard
        )
        end_ns = budget.window_at(self._at_ns).end_ns
        left = _quantity(name, max(0, hard - used[name]))
        moment = format_moment(end_ns, parse_time_zone(budget.time_zone))
        problem = f"is used up: {_limit_name(budget, name)} has {left} left and resets at {moment}"
        message = refusal("budget", problem, limit=_quantity(name, hard), given=_quantity(name, asked[name]))
        return BudgetExceededError(message, retry_after_s=(end_ns - self._at_ns) / NS_PER_S)


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


def _key(budget: Budget, at_ns: int) -> WindowKey:
    return WindowKey(budget.tenant, budget.key_id, budget.window, budget.window_at(at_ns).start_ns)


def _open_windows(connection: Connection, limits: Sequence[Budget], at_ns: int) -> None:
    """Make sure the rows of the current windows exist, and lock them in one order so that batches cannot deadlock."""
    if not limits:
        return
    query = (
        select(_W.tenant, _W.key_id, _W.window, _W.start_ns)
        .where(_W.tenant.in_(sorted({budget.tenant for budget in limits})), _W.start_ns <= at_ns, _W.end_ns > at_ns)
        .order_by(_W.tenant, _W.key_id, _W.window, _W.start_ns)
        .with_for_update()
    )
    known = {WindowKey(*row) for row in connection.execute(query)}
    for budget in limits:
        if (key := _key(budget, at_ns)) not in known:
            window = budget.window_at(at_ns)
            insert_new(
                connection,
                budget_windows,
                {**key._asdict(), "end_ns": window.end_ns, **_used(connection, budget, window)},
            )
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
