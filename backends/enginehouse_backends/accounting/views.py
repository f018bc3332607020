"""Sums of the ledger: usage, cost on both bases, cost of a build. Read from daily sums, so that size does not matter.

Days are UTC, the day of the settlement; periods are from a first day to a last one, both included.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from sqlalchemy import case, func, select

from enginehouse_backends.accounting.allocation import BuildCost, CostLine, CostReport, allocate
from enginehouse_backends.accounting.database import reading
from enginehouse_backends.accounting.price_list import PriceList
from enginehouse_backends.accounting.rows import record_of
from enginehouse_backends.accounting.schema import (
    LINE_COLUMNS,
    USAGE_COLUMNS,
    daily_usage,
    entries,
    machine_days,
)
from enginehouse_backends.accounting.windows import NS_PER_S
from enginehouse_contract.money import Pico, price_of_seconds
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import ColumnElement, Connection, Engine, Select

    from enginehouse_backends.accounting.records import UsageRecord

Dimension = Literal["tenant", "model", "build_id", "day"]
DIMENSIONS: Final[tuple[Dimension, ...]] = get_args(Dimension)

_D: Final = daily_usage.c
_M: Final = machine_days.c
_SPLIT: Final = 10**6  # sums are taken in two parts, so that totals beyond a 64-bit integer do not fail
_COUNTS: Final = ("num_requests", *USAGE_COLUMNS, "energy_uj", "num_estimated", "machine_ns", "num_recovered")


@dataclass(frozen=True, slots=True)
class Period:
    """Days as ISO 8601 dates (UTC), both included; None is open."""

    first_day: str | None = None
    last_day: str | None = None


ALL_DAYS: Final = Period()


@dataclass(frozen=True, slots=True)
class UsageLine:
    """What a group used."""

    group: tuple[str, ...]  # values of the asked dimensions
    num_requests: int
    usage: TokenUsage
    amount: Pico  # of the requests that have a price
    num_unpriced: int
    energy_uj: int
    num_estimated: int
    machine_ns: int
    num_recovered: int


def usage(database: Engine, dimensions: Sequence[Dimension], period: Period = ALL_DAYS) -> list[UsageLine]:
    """Return what each group used, ordered by its dimensions."""
    query = _sums(dimensions, period)
    with reading(database) as connection:
        return [_usage_line(row, dimensions) for row in connection.execute(query).mappings()]


def cost(database: Engine, dimensions: Sequence[Dimension], period: Period = ALL_DAYS) -> CostReport:
    """Return what each group cost on both bases; the allocated lines and idle add up to the machines' bill."""
    by_day: tuple[Dimension, ...] = ("day", *(name for name in dimensions if name != "day"))
    with reading(database) as connection:
        books = PriceList.load(connection)
        lines = [_usage_line(row, by_day) for row in connection.execute(_sums(by_day, period)).mappings()]
        bills = dict(_bills(connection, books, period))
        uptime_ns = sum(row.uptime_ns for row in connection.execute(_machine_time(period)))
    busy_by_day: dict[str, dict[tuple[str, ...], int]] = defaultdict(dict)
    by_group: dict[tuple[str, ...], list[UsageLine]] = defaultdict(list)
    for line in lines:
        values = dict(zip(by_day, line.group, strict=True))
        group = tuple(values[name] for name in dimensions)
        busy_by_day[values["day"]][group] = line.machine_ns
        by_group[group].append(line)
    allocated: dict[tuple[str, ...], int] = defaultdict(int)
    idle = 0
    for day, (bill, day_uptime_ns) in bills.items():
        parts, day_idle = allocate(bill, day_uptime_ns, busy_by_day[day])
        idle += day_idle
        for group, part in parts.items():
            allocated[group] += part
    has_bill = bool(bills)
    cost_lines = tuple(
        CostLine(
            group,
            num_requests=sum(line.num_requests for line in members),
            num_output_tokens=sum(line.usage.num_output_tokens for line in members),
            machine_ns=sum(line.machine_ns for line in members),
            billed=Pico(sum(line.amount for line in members)),
            num_unpriced=sum(line.num_unpriced for line in members),
            allocated=Pico(allocated[group]) if has_bill else None,
        )
        for group, members in sorted(by_group.items())
    )
    return CostReport(
        tuple(dimensions),
        currency_of(books),
        cost_lines,
        uptime_ns=uptime_ns,
        idle_ns=max(0, uptime_ns - sum(line.machine_ns for line in cost_lines)),
        idle=Pico(idle) if has_bill else None,
        machine_bill=Pico(sum(bill for bill, _ in bills.values())) if has_bill else None,
    )


def build_cost(database: Engine, build_id: str, period: Period = ALL_DAYS) -> BuildCost:
    """Return what a build's real runs cost; machine time is priced at the rate in force on its day."""
    with reading(database) as connection:
        books = PriceList.load(connection)
        query = _sums(("day",), period).where(_D.build_id == build_id)
        lines = [_usage_line(row, ("day",)) for row in connection.execute(query).mappings()]
    amounts = [_rate_amount(books, line.group[0], line.machine_ns) for line in lines]
    return BuildCost(
        build_id,
        num_requests=sum(line.num_requests for line in lines),
        num_output_tokens=sum(line.usage.num_output_tokens for line in lines),
        machine_ns=sum(line.machine_ns for line in lines),
        energy_uj=sum(line.energy_uj for line in lines),
        billed=Pico(sum(line.amount for line in lines)),
        machine_amount=Pico(sum(amount for amount in amounts if amount is not None)) if None not in amounts else None,
    )


def records(database: Engine, *, tenant: str | None = None, since_ns: int = 0, limit: int = 100) -> list[UsageRecord]:
    """Return the latest settlements, newest first; of one tenant where asked."""
    order = entries.c.entry_id if tenant is None else entries.c.reserved_at_ns
    query = select(entries).where(entries.c.kind == "settlement", entries.c.reserved_at_ns >= since_ns)
    if tenant is not None:
        query = query.where(entries.c.tenant == tenant)
    with reading(database) as connection:
        books = PriceList.load(connection)
        rows = connection.execute(query.order_by(order.desc(), entries.c.entry_id.desc()).limit(limit)).mappings()
        return [record_of(row, books) for row in rows]


def currency_of(books: PriceList) -> str | None:
    """Return the one currency of a ledger; None before its first price book."""
    return books.books[0].currency if books.books else None


def in_period(day: ColumnElement[str], period: Period) -> list[ColumnElement[bool]]:
    """Return the conditions that a day lies in a period."""
    first = [] if period.first_day is None else [day >= period.first_day]
    return first if period.last_day is None else [*first, day <= period.last_day]


def _sums(dimensions: Sequence[Dimension], period: Period) -> Select[Any]:
    names = [_D[name] for name in dimensions]
    counts = [func.sum(_D[name]).label(name) for name in _COUNTS]
    amount = sum((_D[name] for name in LINE_COLUMNS[1:]), start=_D[LINE_COLUMNS[0]])
    amounts = [func.sum(amount // _SPLIT).label("amount_whole"), func.sum(amount % _SPLIT).label("amount_rest")]
    unpriced = func.sum(case((_D.book_id == "", _D.num_requests), else_=0)).label("num_unpriced")
    query = select(*names, *counts, *amounts, unpriced).where(*in_period(_D.day, period))
    return query.group_by(*names).order_by(*names) if names else query.having(func.count() > 0)


def _usage_line(row: Any, dimensions: Sequence[Dimension]) -> UsageLine:
    counts = {name: int(row[name]) for name in _COUNTS}
    return UsageLine(
        tuple(row[name] for name in dimensions),
        counts["num_requests"],
        TokenUsage(**{name: counts[name] for name in USAGE_COLUMNS}),
        Pico(int(row["amount_whole"]) * _SPLIT + int(row["amount_rest"])),
        int(row["num_unpriced"]),
        counts["energy_uj"],
        counts["num_estimated"],
        counts["machine_ns"],
        counts["num_recovered"],
    )


def _machine_time(period: Period) -> Select[Any]:
    query = select(_M.day, func.sum(_M.uptime_ns).label("uptime_ns")).where(*in_period(_M.day, period))
    return query.group_by(_M.day).order_by(_M.day)


def _bills(connection: Connection, books: PriceList, period: Period) -> Iterator[tuple[str, tuple[Pico, int]]]:
    """What the machines cost on each day, and how long they were up; days without a rate are left out."""
    for row in connection.execute(_machine_time(period)):
        bill = _rate_amount(books, row.day, int(row.uptime_ns))
        if bill is not None:
            yield row.day, (bill, int(row.uptime_ns))


def _rate_amount(books: PriceList, day: str, duration_ns: int) -> Pico | None:
    """Machine time at the rate in force when the day ends."""
    end = datetime.fromisoformat(f"{day}T23:59:59").replace(tzinfo=timezone.utc)
    in_force = books.in_force(int(end.timestamp()) * NS_PER_S)
    if in_force is None or in_force[1].machine_per_hour is None:
        return None
    return price_of_seconds(duration_ns, in_force[1].machine_per_hour)
