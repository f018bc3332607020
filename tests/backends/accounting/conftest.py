"""Ledgers on both databases."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from tests.support.postgres import find_postgres, run_postgres

from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.price_book import parse_price_book

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.postgres import PostgresServer

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Start a PostgreSQL server of the tests' own."""
    programs = find_postgres()
    if programs is None:
        reason = "PostgreSQL IS NOT TESTED: its server is not installed (apt-get install postgresql)"
        pytest.skip(reason)
    yield from run_postgres(programs)


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a new, empty ledger."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database(f"ledger_{next(_NUMBERS)}")


class Clock:
    """A clock that tests set; Unix time in ns."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


BOOK = """\
currency: USD
effective_from: 2020-01-01T00:00:00Z
machine_per_hour: "0.36"
energy_per_kwh: "0.30"
prices:
  - model: small
    input: "1"
    cached_input: "0.25"
    output: "4"
"""


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """Open a ledger that prices the model `small`."""
    with Ledger(ledger_url) as opened:
        opened.add_price_book(parse_price_book(BOOK))
        yield opened
