"""`enginehouse prices`: the price books of the ledger."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from enginehouse_cli.console import stdout
from enginehouse_cli.ledger import CsvFlag, LedgerOption, open_ledger, print_rows
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from enginehouse_backends.accounting.price_book import PriceBook

app = typer.Typer(help="What a million tokens, an hour and a kilowatt hour cost, from when on.", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="A YAML price book.", show_default=False)]
MapArgument = Annotated[Path, typer.Argument(help="LiteLLM's price map, a JSON file.", show_default=False)]
CurrencyOption = Annotated[str, typer.Option("--currency", help="ISO 4217 code.")]
FromOption = Annotated[str, typer.Option("--effective-from", help="ISO 8601 time with its zone.", show_default=False)]
OutputOption = Annotated[Optional[Path], typer.Option("--output", "-o", help="Write here instead of stdout.")]


@app.command("list")
def list_books(ledger: LedgerOption = None, *, as_json: JsonFlag = False, as_csv: CsvFlag = False) -> None:
    """List the price books, the latest first."""
    with open_ledger(ledger) as opened:
        books = opened.price_list().books
    rows: list[dict[str, Any]] = [
        {
            "effective_from": book.effective_from.isoformat(),
            "currency": book.currency,
            "models": len(book.by_model),
            "builds": len(book.by_build),
            "machine_per_hour": _plain(book.machine_per_hour),
            "energy_per_kwh": _plain(book.energy_per_kwh),
            "unknown_model": book.unknown_model,
            "book_id": book.book_id,
        }
        for book in books
    ]
    print_rows(rows, as_json=as_json, as_csv=as_csv, if_none="no price books; add one with `enginehouse prices add`.")


@app.command("show")
def show_prices(ledger: LedgerOption = None, *, as_json: JsonFlag = False, as_csv: CsvFlag = False) -> None:
    """Show the prices in force now, per million tokens."""
    import time  # noqa: PLC0415 - needed here only

    with open_ledger(ledger) as opened:
        in_force = opened.price_list().in_force(time.time_ns())
    rows = [] if in_force is None else _price_rows(in_force[1])
    print_rows(rows, as_json=as_json, as_csv=as_csv, if_none="no price book is in force.")


@app.command("add")
def add_book(file: FileArgument, ledger: LedgerOption = None) -> None:
    """Add a price book; running servers use it from its date on."""
    from enginehouse_backends.accounting.price_book import parse_price_book  # noqa: PLC0415 - as above

    book = parse_price_book(_read(file), str(file))
    with open_ledger(ledger) as opened:
        opened.add_price_book(book)
    stdout.print(f"added {book.book_id}, in force from {book.effective_from.isoformat()}", markup=False)


@app.command("import")
def import_map(
    file: MapArgument, effective_from: FromOption, currency: CurrencyOption = "USD", output: OutputOption = None
) -> None:
    """Turn LiteLLM's price map into a price book, to be looked at and then added."""
    from enginehouse_backends.accounting.price_book import import_litellm  # noqa: PLC0415 - as above

    text = import_litellm(_read(file), currency, effective_from)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {error.strerror}.") from error


def _price_rows(book: PriceBook) -> list[dict[str, Any]]:
    return [
        {
            "for": kind,
            "name": name,
            "input": _plain(prices.input),
            "cached_input": _plain(prices.cached_input),
            "output": _plain(prices.output),
            "currency": book.currency,
        }
        for kind, table in (("build", book.by_build), ("model", book.by_model))
        for name, prices in sorted(table.items())
    ]


def _plain(price: object) -> str | None:
    return None if price is None else f"{price:f}"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(f"{file} cannot be read: {reason}.") from error
