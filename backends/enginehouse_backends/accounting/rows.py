"""Between the ledger's rows and its values, and finding rows by key."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Text, and_, bindparam, cast, column, delete, func, select
from sqlalchemy.dialects.postgresql import JSONB

from enginehouse_backends.accounting.price_book import TokenPrices
from enginehouse_backends.accounting.records import ComputeShare, RequestKey, RequestTimes, UsageRecord
from enginehouse_backends.accounting.schema import USAGE_COLUMNS, entries, holds
from enginehouse_contract.errors import LedgerConflictError, refusal
from enginehouse_contract.money import Pico
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy import Connection, RowMapping, Select, Table

    from enginehouse_backends.accounting.price_list import PriceList

    Row = Mapping[str, Any] | RowMapping

_E: Final = entries.c
_H: Final = holds.c


def usage_columns(usage: TokenUsage) -> dict[str, int]:
    """Return a usage as columns."""
    return {name: getattr(usage, name) for name in USAGE_COLUMNS}


def usage_of(row: Row) -> TokenUsage:
    """Read a usage from columns."""
    return TokenUsage(**{name: row[name] for name in USAGE_COLUMNS})


@cache
def _rows_of_keys(dialect: str, table: Table) -> Select[Any]:
    """Rows whose key is in the JSON list of ``keys``. A join, since SQLite scans the table for (a, b, c) IN (...)."""
    keys = bindparam("keys", type_=Text)
    if dialect == "postgresql":
        wanted: Any = func.jsonb_array_elements(cast(keys, JSONB)).table_valued(column("value", JSONB))
        parts = [wanted.c.value[position].astext for position in range(3)]
        parts[2] = cast(parts[2], BigInteger)
    else:
        wanted = func.json_each(keys).table_valued("value")
        parts = [func.json_extract(wanted.c.value, f"$[{position}]") for position in range(3)]
    is_wanted = [table.c[name] == part for name, part in zip(RequestKey._fields, parts, strict=True)]
    return select(table).select_from(wanted.join(table, and_(*is_wanted)))


def find_holds(connection: Connection, keys: Iterable[RequestKey]) -> dict[RequestKey, RowMapping]:
    """Return the open holds among *keys*."""
    return _find(connection, _rows_of_keys(connection.dialect.name, holds), keys)


def find_entries(connection: Connection, kind: str, keys: Iterable[RequestKey]) -> dict[RequestKey, RowMapping]:
    """Return the entries of a kind among *keys*."""
    query = _rows_of_keys(connection.dialect.name, entries).where(_E.kind == bindparam("kind"))
    return _find(connection, query, keys, kind=kind)


def _find(
    connection: Connection, query: Select[Any], keys: Iterable[RequestKey], **parameters: str
) -> dict[RequestKey, RowMapping]:
    if not (wanted := sorted(set(keys))):
        return {}
    rows = connection.execute(query, {"keys": json.dumps(wanted), **parameters})
    return {key_of(row): row for row in rows.mappings()}


_END_HOLD: Final = delete(holds).where(*(_H[name] == bindparam(f"of_{name}") for name in RequestKey._fields))


def end_holds(connection: Connection, keys: Iterable[RequestKey]) -> None:
    """Delete holds."""
    connection.execute(_END_HOLD, [{f"of_{name}": value for name, value in key._asdict().items()} for key in keys])


_OWN_COLUMNS: Final = tuple(column.name for column in entries.c if not column.primary_key)


def entry_row(row: Row, *, kind: str, at_ns: int, reason: str = "") -> dict[str, Any]:
    """Return an entry that repeats what *row* (a new reservation, a hold or an entry) says, as another kind."""
    values = {name: row.get(name) for name in _OWN_COLUMNS}
    is_recovered = bool(row.get("is_recovered"))
    return {
        **values,
        "kind": kind,
        "reason": reason,
        "is_recovered": is_recovered,
        "at_ns": max(at_ns, row["reserved_at_ns"]),
    }


def settlement_row(record: UsageRecord) -> dict[str, Any]:
    """Return a settlement as a row."""
    prices = record.unit_prices or (None, None, None)
    share = record.share
    return {
        **record.key._asdict(),
        "kind": "settlement",
        "key_id": record.key_id,
        "model": record.model,
        "build_id": record.build_id,
        **usage_columns(record.usage),
        "amount": record.amount,
        "book_id": record.book_id,
        "input_price": prices[0],
        "cached_input_price": prices[1],
        "output_price": prices[2],
        "reason": record.finish_reason,
        "time_to_first_token_ns": record.times.time_to_first_token_ns,
        "duration_ns": record.times.duration_ns,
        "energy_uj": None if share is None else share.energy_uj,
        "machine_ns": None if share is None else share.machine_ns,
        "is_estimated": None if share is None else share.is_estimated,
        "is_recovered": record.is_recovered,
        "reserved_at_ns": record.reserved_at_ns,
        "at_ns": record.settled_at_ns,
    }


def record_of(row: RowMapping, books: PriceList) -> UsageRecord:
    """Read a settlement back."""
    book = books.by_id(row["book_id"])
    has_share = row["energy_uj"] is not None
    return UsageRecord(
        key=key_of(row),
        key_id=row["key_id"],
        model=row["model"],
        build_id=row["build_id"],
        usage=usage_of(row),
        finish_reason=row["reason"],
        amount=money(row["amount"]),
        currency=book.currency if book is not None else None,
        book_id=row["book_id"],
        unit_prices=unit_prices_of(row),
        times=RequestTimes(row["time_to_first_token_ns"], row["duration_ns"]),
        share=ComputeShare(row["energy_uj"], row["machine_ns"], row["is_estimated"]) if has_share else None,
        reserved_at_ns=row["reserved_at_ns"],
        settled_at_ns=row["at_ns"],
        is_recovered=row["is_recovered"],
    )


def hold_row(row: Row, owner: str, claim: str) -> dict[str, Any]:
    """Return the hold of a new reservation: nothing is used yet."""
    names = ("tenant", "request_id", "attempt", "key_id", "model", "build_id", "amount", "reserved_at_ns")
    prices = ("book_id", "input_price", "cached_input_price", "output_price")
    num_tokens = sum(row[name] for name in USAGE_COLUMNS[:3])
    values = {name: row[name] for name in (*names, *prices)}
    return {**values, **usage_columns(TokenUsage()), "num_tokens": num_tokens, "owner": owner, "claim": claim}


def key_of(row: Row) -> RequestKey:
    """Return the key of a row."""
    return RequestKey(row["tenant"], row["request_id"], row["attempt"])


def money(amount: int | None) -> Pico | None:
    """Read an amount."""
    return None if amount is None else Pico(amount)


def unit_prices_of(row: Row) -> tuple[str, str, str] | None:
    """Read the unit prices of a row."""
    if row["input_price"] is None:
        return None
    return (row["input_price"], row["cached_input_price"], row["output_price"])


@lru_cache(maxsize=4096)
def price_lines(unit_prices: tuple[str, str, str] | None, usage: TokenUsage) -> tuple[int, int, int] | None:
    """Price the billed classes (input, cached input, output) in pico-units; None without prices."""
    if unit_prices is None:
        return None
    lines = TokenPrices(*(Decimal(price) for price in unit_prices)).lines(usage)
    return (lines["input"], lines["cached_input"], lines["output"])


def conflict(key: RequestKey, problem: str) -> LedgerConflictError:
    """Word a conflict between an operation and what the ledger holds."""
    return LedgerConflictError(refusal("request_id", problem, given=str(tuple(key))))
