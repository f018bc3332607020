"""Writing settlements: batches, each inside one transaction of the ledger.

Reads what is there, decides for each operation by itself, and writes for all at once. A refused operation leaves
nothing behind; its outcome is the exception.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from sqlalchemy import insert

from enginehouse_backends.accounting.charges import Charge, charge_windows
from enginehouse_backends.accounting.records import MAX_BIGINT, ComputeShare, RequestKey, Settlement, UsageRecord
from enginehouse_backends.accounting.rows import (
    conflict,
    end_holds,
    find_entries,
    find_holds,
    price_lines,
    record_of,
    settlement_row,
    unit_prices_of,
    usage_columns,
)
from enginehouse_backends.accounting.schema import LINE_COLUMNS, daily_usage, entries
from enginehouse_backends.accounting.upsert import insert_or_add
from enginehouse_backends.accounting.windows import utc_day
from enginehouse_contract.errors import EnginehouseError, InvalidRequestError, refusal
from enginehouse_contract.money import Pico

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy import Connection, RowMapping

    from enginehouse_backends.accounting.budgets import BudgetsByTenant
    from enginehouse_backends.accounting.price_list import PriceList


def settle(
    connection: Connection, settlements: Sequence[Settlement], books: PriceList, budgets: BudgetsByTenant, at_ns: int
) -> list[UsageRecord | EnginehouseError]:
    """End each hold with what was used."""
    open_holds = find_holds(connection, [settlement.key for settlement in settlements])
    ended = [settlement.key for settlement in settlements if settlement.key not in open_holds]
    known = find_entries(connection, "settlement", ended)
    new: dict[RequestKey, UsageRecord] = {}
    outcomes: list[UsageRecord | EnginehouseError] = []
    for settlement in settlements:
        key = settlement.key
        if key in new or key in known:
            record = new.get(key) or record_of(known[key], books)
            outcomes.append(
                record if record.says(settlement) else conflict(key, "was settled before with other content")
            )
        elif key not in open_holds:
            outcomes.append(conflict(key, "has no open reservation"))
        else:
            try:
                new[key] = _settled(open_holds[key], settlement, books, at_ns)
            except EnginehouseError as error:
                outcomes.append(error)
                continue
            outcomes.append(new[key])
    if new:
        end_holds(connection, new)
        connection.execute(insert(entries), [settlement_row(record) for record in new.values()])
        charge_windows(connection, [_charge(open_holds[key], record) for key, record in new.items()], budgets)
        add_to_days(connection, new.values(), at_ns)
    return outcomes


def _settled(hold: RowMapping, settlement: Settlement, books: PriceList, at_ns: int) -> UsageRecord:
    unit_prices = unit_prices_of(hold)
    lines = price_lines(unit_prices, settlement.usage)
    amount = None if lines is None else Pico(sum(lines))
    if amount is not None and amount > MAX_BIGINT:
        raise InvalidRequestError(refusal("usage", "costs more than the ledger can hold", given=amount))
    book = books.by_id(hold["book_id"])
    return UsageRecord(
        key=settlement.key,
        key_id=hold["key_id"],
        model=hold["model"],
        build_id=hold["build_id"],
        usage=settlement.usage,
        finish_reason=settlement.finish_reason,
        amount=amount,
        currency=book.currency if book is not None else None,
        book_id=hold["book_id"],
        unit_prices=unit_prices,
        times=settlement.times,
        share=settlement.share,
        reserved_at_ns=hold["reserved_at_ns"],
        settled_at_ns=max(at_ns, hold["reserved_at_ns"]),
        is_recovered=settlement.is_recovered,
    )


def _charge(hold: RowMapping, record: UsageRecord) -> Charge:
    num_tokens = record.usage.num_input_tokens + record.usage.num_output_tokens
    return Charge(
        record.key.tenant,
        record.key_id,
        record.reserved_at_ns,
        spent=record.amount or 0,
        held=-(hold["amount"] or 0),
        num_requests=0,
        num_tokens=num_tokens - hold["num_tokens"],
    )


def add_to_days(connection: Connection, records: Iterable[UsageRecord], at_ns: int, sign: int = 1) -> None:
    """Keep the daily sums in step with the entries; *sign* -1 takes records out again."""
    days: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for record in records:
        day = utc_day(max(at_ns, record.settled_at_ns))
        sums = days[day, record.key.tenant, record.model, record.build_id, record.book_id or ""]
        lines = price_lines(record.unit_prices, record.usage) or (0, 0, 0)
        share = record.share or ComputeShare()
        for name, value in (
            ("num_requests", 1),
            *usage_columns(record.usage).items(),
            *zip(LINE_COLUMNS, lines, strict=True),
            ("energy_uj", share.energy_uj),
            ("num_estimated", int(share.is_estimated)),
            ("machine_ns", share.machine_ns),
            ("num_recovered", int(record.is_recovered)),
        ):
            sums[name] += sign * value
    names = [column.name for column in daily_usage.primary_key]
    rows = [{**dict(zip(names, key, strict=True)), **sums} for key, sums in sorted(days.items())]
    insert_or_add(connection, daily_usage, rows)
