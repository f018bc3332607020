"""The price books of a ledger: which one is in force when. Books are added, never changed or removed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from sqlalchemy import insert, select

from enginehouse_backends.accounting.price_book import PriceBook
from enginehouse_backends.accounting.schema import price_books
from enginehouse_backends.accounting.windows import NS_PER_S
from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from enginehouse_backends.accounting.price_book import TokenPrices

_P: Final = price_books.c
_DATES: Final = select(_P.effective_from_ns, _P.book_id).order_by(_P.effective_from_ns.desc())


class PriceList:
    """The books of one ledger, kept in memory; :meth:`refresh` picks up what other processes added."""

    def __init__(self) -> None:
        self._books: dict[str, PriceBook] = {}
        self._by_date: list[tuple[int, str]] = []  # latest first

    @classmethod
    def load(cls, connection: Connection) -> PriceList:
        """Read every book."""
        books = cls()
        books.refresh(connection)
        return books

    def refresh(self, connection: Connection) -> None:
        """Read the books that are not known yet."""
        self._by_date = [(row.effective_from_ns, row.book_id) for row in connection.execute(_DATES)]
        unknown = [book_id for _, book_id in self._by_date if book_id not in self._books]
        if unknown:
            for row in connection.execute(select(_P.book_id, _P.content).where(_P.book_id.in_(unknown))):
                self._books[row.book_id] = PriceBook.from_canonical_json(row.content)

    @property
    def books(self) -> list[PriceBook]:
        """Every book, the latest first."""
        return [self._books[book_id] for _, book_id in self._by_date]

    def in_force(self, at_ns: int) -> tuple[str, PriceBook] | None:
        """Return the id and the book in force at a moment (Unix time in ns), None before the first."""
        for start_ns, book_id in self._by_date:
            if start_ns <= at_ns:
                return book_id, self._books[book_id]
        return None

    def by_id(self, book_id: str | None) -> PriceBook | None:
        """Return a book by its digest."""
        return self._books.get(book_id or "")


def effective_from_ns(book: PriceBook) -> int:
    """Return when a book comes into force, as Unix time in ns."""
    return int(book.effective_from.timestamp()) * NS_PER_S


def add_price_book(connection: Connection, book: PriceBook) -> None:
    """Add a book; adding it again changes nothing.

    Raises:
        ConfigurationError: Another book has the same date, or prices in another currency.
    """
    for known in PriceList.load(connection).books:
        if known.book_id == book.book_id:
            return
        if effective_from_ns(known) == effective_from_ns(book):
            hint = f"Give it a later date, or keep {known.book_id}."
            problem = "is the date of another price book already"
            raise ConfigurationError(
                refusal("effective_from", problem, given=book.effective_from.isoformat(), hint=hint)
            )
        if known.currency != book.currency:
            hint = "One ledger has one currency: budgets and bills add up in it."
            raise ConfigurationError(
                refusal("currency", "differs from the ledger's", limit=known.currency, given=book.currency, hint=hint)
            )
    values = {
        "book_id": book.book_id,
        "effective_from_ns": effective_from_ns(book),
        "content": book.canonical_json(),
        "added_at_ns": time.time_ns(),
    }
    connection.execute(insert(price_books), values)


def price_columns(book_id: str, prices: TokenPrices) -> dict[str, str]:
    """Return what an entry says of its prices: the book and the unit prices."""
    return {
        "book_id": book_id,
        "input_price": f"{prices.input:f}",
        "cached_input_price": f"{prices.cached_input:f}",
        "output_price": f"{prices.output:f}",
    }


def no_price_columns() -> dict[str, None]:
    """Return what an entry without a price says: nulls."""
    return dict.fromkeys(("book_id", "input_price", "cached_input_price", "output_price"))
