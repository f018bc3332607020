"""Writing releases (a hold ends without a bill) and reversals (a bill is taken back), inside a transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import insert

from enginehouse_backends.accounting.charges import Charge, charge_windows
from enginehouse_backends.accounting.rows import (
    conflict,
    end_holds,
    entry_row,
    find_entries,
    find_holds,
    record_of,
    usage_columns,
)
from enginehouse_backends.accounting.schema import USAGE_COLUMNS, entries
from enginehouse_backends.accounting.settling import add_to_days
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, RowMapping

    from enginehouse_backends.accounting.budgets import BudgetsByTenant
    from enginehouse_backends.accounting.price_list import PriceList
    from enginehouse_backends.accounting.records import RequestKey
    from enginehouse_contract.errors import EnginehouseError


class Withdrawal(NamedTuple):
    """The end of a hold without a bill (`release`), or of a bill (`reversal`)."""

    key: RequestKey
    kind: str
    reason: str


def withdraw(
    connection: Connection, withdrawals: Sequence[Withdrawal], books: PriceList, budgets: BudgetsByTenant, at_ns: int
) -> list[EnginehouseError | None]:
    """Release holds that never ran, and reverse settlements; each by an entry of its own."""
    return [_withdraw(connection, withdrawal, books, budgets, at_ns) for withdrawal in withdrawals]


def _withdraw(
    connection: Connection, it: Withdrawal, books: PriceList, budgets: BudgetsByTenant, at_ns: int
) -> EnginehouseError | None:
    if done := find_entries(connection, it.kind, [it.key]):
        return None if done[it.key]["reason"] == it.reason else conflict(it.key, f"has a {it.kind} for another reason")
    if it.kind == "release":
        hold = find_holds(connection, [it.key]).get(it.key)
        if hold is None:
            return conflict(it.key, "has no open reservation")
        end_holds(connection, [it.key])
        row = {**hold, **usage_columns(TokenUsage()), "amount": None if hold["amount"] is None else 0}
        held = hold["amount"] or 0
        charge = Charge(it.key.tenant, hold["key_id"], hold["reserved_at_ns"], 0, -held, -1, -hold["num_tokens"])
    else:
        settled = find_entries(connection, "settlement", [it.key]).get(it.key)
        if settled is None:
            return conflict(it.key, "has no settlement to reverse")
        row = _negated(settled)
        billed = sum(row[name] for name in USAGE_COLUMNS[:3])
        charge = Charge(it.key.tenant, row["key_id"], row["reserved_at_ns"], row["amount"] or 0, 0, -1, billed)
        add_to_days(connection, [record_of(settled, books)], at_ns, sign=-1)
    connection.execute(insert(entries), entry_row(row, kind=it.kind, reason=it.reason, at_ns=at_ns))
    charge_windows(connection, [charge], budgets)
    return None


def _negated(row: RowMapping) -> dict[str, Any]:
    names = (*USAGE_COLUMNS, "amount", "energy_uj", "machine_ns")
    return {**row, **{name: None if row[name] is None else -row[name] for name in names}}
