"""Opening the ledger's database, and its failures in words.

SQLite: a write-ahead log with every commit flushed to the disk; writers queue for the lock when they begin, so that a
transaction never fails half-way because of another. PostgreSQL: as the server is set up.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from enginehouse_contract.errors import ConfigurationError, LedgerUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

_BUSY_TIMEOUT_S: Final = 10.0
_SQLITE_PRAGMAS: Final = ("journal_mode = WAL", "synchronous = FULL")
_READS: Final = "ledger_reads"  # an execution option of ours


def connect(url: str) -> Engine:
    """Return an engine for ``sqlite:///path`` or ``postgresql://...``; nothing is opened yet.

    Raises:
        ConfigurationError: The URL is wrong, or its driver is missing.
    """
    parsed = _parse(url)
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    try:
        engine = create_engine(parsed, pool_pre_ping=parsed.drivername != "sqlite")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the ledger `{parsed.render_as_string()}` needs the package `{error.name}`: "
            "pip install 'enginehouse[postgres]'."
        ) from error
    if engine.dialect.name == "sqlite":
        _set_up_sqlite(engine)
    return engine


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise ConfigurationError(f"the ledger's URL `{url}` cannot be read: {error}") from error
    if parsed.drivername not in {"sqlite", "postgresql", "postgresql+psycopg"}:
        raise ConfigurationError(
            f"the ledger's URL must start with sqlite:/// or postgresql://; given {parsed.drivername}"
        )
    return parsed


def _set_up_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say, below
        connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_TIMEOUT_S * 1000)}")
        for pragma in _SQLITE_PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        is_reader = connection.get_execution_options().get(_READS, False)
        connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that only reads: one snapshot, and no writer waits for it."""
    with failures_in_words(engine), engine.connect().execution_options(**{_READS: True}) as connection:
        yield connection


@contextmanager
def failures_in_words(engine: Engine) -> Iterator[None]:
    """Turn the database's own failures (not its refusals of data) into :class:`LedgerUnavailableError`."""
    try:
        yield
    except SQLAlchemyError as error:
        if not is_unavailable(error):
            raise
        where = engine.url.render_as_string(hide_password=True)
        cause = str(error.orig if isinstance(error, DBAPIError) else error).strip().splitlines()[0]
        hint = next((hint for words, hint in _HINTS if words in cause.lower()), "Check the database, then try again.")
        raise LedgerUnavailableError(f"the ledger {where} failed: {cause}. {hint}") from error


_HINTS: Final = (
    ("disk is full", "Free some space; nothing that was acknowledged is lost."),
    ("disk i/o error", "Check the disk and its quota; nothing that was acknowledged is lost."),
    ("readonly", "Make its folder writable for this user."),
    ("unable to open", "Make sure its folder exists and is writable for this user."),
    ("locked", "Another process has kept it locked; end that process or wait."),
    ("connection", "Start the database or correct the ledger's URL."),
)

_LOST_RACES: Final = frozenset({"40001", "40P01"})
"""PostgreSQL's codes of a serialization failure and a deadlock: run again and it works."""


def is_unavailable(error: BaseException) -> bool:
    """Whether the database failed as such, so that no statement would work now."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, SQLAlchemyError) and isinstance(error.__cause__, OSError)
    if getattr(error.orig, "sqlstate", None) in _LOST_RACES:
        return False
    return isinstance(error, OperationalError) or error.connection_invalidated
