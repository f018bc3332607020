"""INSERT with a say on duplicates, which both databases spell alike but SQLAlchemy keeps per dialect."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy.dialects import postgresql, sqlite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Table

    Rows = dict[str, Any] | Sequence[dict[str, Any]]
    Insert = postgresql.Insert | sqlite.Insert


def insert_new(connection: Connection, table: Table, rows: Rows) -> None:
    """Insert rows; those whose key is there already change nothing."""
    connection.execute(_insert(connection.dialect.name, table).on_conflict_do_nothing(), rows)


def insert_or_replace(connection: Connection, table: Table, rows: Rows) -> None:
    """Insert rows; those whose primary key is there already replace it."""
    connection.execute(_upsert(connection.dialect.name, table, "replace"), rows)


def insert_or_add(connection: Connection, table: Table, rows: Rows) -> None:
    """Insert rows; where a primary key is there already, add their numbers to its."""
    connection.execute(_upsert(connection.dialect.name, table, "add"), rows)


def _insert(dialect: str, table: Table) -> Insert:
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


@cache  # building one takes longer than running it
def _upsert(dialect: str, table: Table, how: Literal["replace", "add"]) -> Insert:
    statement = _insert(dialect, table)
    new = statement.excluded
    values = {
        column.name: new[column.name] if how == "replace" else column + new[column.name]
        for column in table.c
        if not column.primary_key
    }
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=values)
