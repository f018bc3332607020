"""The ledger's tables and how an older ledger becomes a newer one. Portable between SQLite and PostgreSQL.

::

    entries        append-only: what was reserved, settled, released, reversed; unique per request attempt and kind
    holds          open reservations: the upper bound held, the last durable token counts, the owner's process
    budgets        limits per tenant, key and window
    budget_windows what was spent and is held in a window of time
    daily_usage    entries summed by day, kept in step in the same transaction, so that views are fast
    machine_days   how long each machine was up, and the energy it used idle
    price_books    every price book ever in force, by digest
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    func,
    insert,
    inspect,
    select,
    text,
)

from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

METADATA: Final = MetaData()

USAGE_COLUMNS: Final = (
    "num_input_uncached_tokens",
    "num_input_cached_tokens",
    "num_output_tokens",
    "num_draft_rejected_tokens",
    "num_recomputed_tokens",
    "num_discarded_tokens",
)
"""The token classes, named as in :class:`~enginehouse_contract.usage.TokenUsage`."""

LINE_COLUMNS: Final = ("input_amount", "cached_input_amount", "output_amount")
"""Money by billed token class, in pico-units."""


def _text(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, Text, nullable=nullable)


def _big(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def _tokens() -> list[Column[int]]:
    return [_big(name) for name in USAGE_COLUMNS]


def _prices() -> list[Column[str]]:
    names = ("book_id", "input_price", "cached_input_price", "output_price")
    return [_text(name, nullable=True) for name in names]


ledger_schema: Final = Table(
    "ledger_schema",
    METADATA,
    Column("version", Integer, primary_key=True, autoincrement=False),
    _big("applied_at_ns"),
)

price_books: Final = Table(
    "price_books",
    METADATA,
    Column("book_id", Text, primary_key=True),
    Column("effective_from_ns", BigInteger, nullable=False, unique=True),
    _text("content"),
    _big("added_at_ns"),
)

entries: Final = Table(
    "entries",
    METADATA,
    Column(
        "entry_id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True
    ),  # SQLite numbers only an INTEGER
    _text("tenant"),
    _text("request_id"),
    Column("attempt", BigInteger, nullable=False),
    _text("kind"),  # reservation, settlement, release, reversal
    _text("key_id"),
    _text("model"),
    _text("build_id"),
    *_tokens(),  # of a reservation: the upper bound; of a reversal: negative
    _big("amount", nullable=True),  # pico-units; null: no price
    *_prices(),
    _text("reason"),  # of a settlement: how the request finished; of a release or a reversal: why
    _big("time_to_first_token_ns", nullable=True),
    _big("duration_ns", nullable=True),
    _big("energy_uj", nullable=True),
    _big("machine_ns", nullable=True),
    Column("is_estimated", Boolean(create_constraint=False), nullable=True),
    Column("is_recovered", Boolean(create_constraint=False), nullable=False),
    _big("reserved_at_ns"),
    _big("at_ns"),
    UniqueConstraint("tenant", "request_id", "attempt", "kind", name="one_entry_of_a_kind"),
    Index("entries_of_tenant", "tenant", "reserved_at_ns"),
)

holds: Final = Table(
    "holds",
    METADATA,
    _text("tenant"),
    _text("request_id"),
    Column("attempt", BigInteger, nullable=False),
    _text("key_id"),
    _text("model"),
    _text("build_id"),
    *_tokens(),  # the last durable counts
    _big("amount", nullable=True),  # the upper bound, in pico-units
    _big("num_tokens"),  # the upper bound of billed tokens
    *_prices(),
    _text("owner"),
    _text("claim"),  # of the call that reserved it
    _big("reserved_at_ns"),
    PrimaryKeyConstraint("tenant", "request_id", "attempt"),
)

budgets: Final = Table(
    "budgets",
    METADATA,
    _text("tenant"),
    _text("key_id"),  # "" limits all keys of the tenant together
    _text("window"),
    _text("time_zone"),
    *(
        _big(f"{strength}_{measure}", nullable=True)
        for measure in ("spend", "requests", "tokens")
        for strength in ("soft", "hard")
    ),
    PrimaryKeyConstraint("tenant", "key_id", "window"),
)

budget_windows: Final = Table(
    "budget_windows",
    METADATA,
    _text("tenant"),
    _text("key_id"),
    _text("window"),
    _big("start_ns"),
    _big("end_ns"),
    _big("spent"),
    _big("held"),
    _big("num_requests"),
    _big("num_tokens"),
    PrimaryKeyConstraint("tenant", "key_id", "window", "start_ns"),
)

daily_usage: Final = Table(
    "daily_usage",
    METADATA,
    _text("day"),  # UTC, ISO 8601
    _text("tenant"),
    _text("model"),
    _text("build_id"),
    _text("book_id"),  # "": no price
    _big("num_requests"),
    *_tokens(),
    *(_big(name) for name in LINE_COLUMNS),
    _big("energy_uj"),
    _big("num_estimated"),  # requests whose energy is declared, not measured
    _big("machine_ns"),
    _big("num_recovered"),
    PrimaryKeyConstraint("day", "tenant", "model", "build_id", "book_id"),
)

machine_days: Final = Table(
    "machine_days",
    METADATA,
    _text("day"),
    _text("machine"),
    _big("uptime_ns"),
    _big("idle_energy_uj"),
    _big("num_estimated"),  # reports whose energy is declared, not measured
    PrimaryKeyConstraint("day", "machine"),
)


def _create_tables(connection: Connection) -> None:
    METADATA.create_all(connection)


def _add_discarded_tokens(connection: Connection) -> None:
    """Version 1 had no class for tokens generated past a sequence's end."""
    for table in (entries, holds, daily_usage):
        if "num_discarded_tokens" not in {column["name"] for column in inspect(connection).get_columns(table.name)}:
            connection.execute(text(f"ALTER TABLE {table.name} ADD num_discarded_tokens BIGINT NOT NULL DEFAULT 0"))


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_create_tables, _add_discarded_tokens)
"""Step n makes a ledger of version n out of one of version n - 1. Steps are only ever added."""

_MIGRATION_LOCK: Final = 0x656E67696E65  # any number no one else uses in this database


def migrate(engine: Engine) -> None:
    """Bring the ledger to this program's version, in one transaction.

    Raises:
        ConfigurationError: The ledger was written by a newer program.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        version = _version(connection)
        if version > len(MIGRATIONS):
            raise ConfigurationError(
                f"the ledger has schema version {version}, this program knows {len(MIGRATIONS)}: "
                "it was written by a newer Enginehouse. Upgrade this one, or point it at another ledger."
            )
        for number, step in enumerate(MIGRATIONS[version:], version + 1):
            step(connection)
            connection.execute(insert(ledger_schema), {"version": number, "applied_at_ns": time.time_ns()})


def _version(connection: Connection) -> int:
    if not inspect(connection).has_table(ledger_schema.name):
        return 0
    return int(connection.execute(select(func.coalesce(func.max(ledger_schema.c.version), 0))).scalar_one())
