"""What the commands that read or set the ledger share: opening it, choosing days, printing rows."""

from __future__ import annotations

import csv
import sys
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Final, Optional

import typer
from rich.console import Console
from rich.table import Table

from enginehouse_cli.console import print_json, stdout
from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.money import format_amount
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginehouse_backends.accounting.ledger import Ledger
    from enginehouse_backends.accounting.views import Dimension, Period
    from enginehouse_contract.money import Pico

CsvFlag = Annotated[bool, typer.Option("--csv", help="Print CSV on stdout.")]
LedgerOption = Annotated[
    Optional[str],
    typer.Option("--ledger", help="sqlite:///path or postgresql://... Default: ENGINEHOUSE_LEDGER_URL."),
]
SinceOption = Annotated[Optional[str], typer.Option("--since", help="First day (UTC), such as 2026-01-31.")]
UntilOption = Annotated[Optional[str], typer.Option("--until", help="Last day (UTC), included.")]
ByOption = Annotated[str, typer.Option("--by", help="Any of tenant, model, build, day; separated by commas.")]


_MAX_WIDTH: Final = 10_000
_NUM_ID_CHARS: Final = len("sha256:") + 12


def open_ledger(url: str | None) -> Ledger:
    """Open the ledger that is named, else that of this installation; close it after use."""
    from enginehouse_backends.accounting import setup  # noqa: PLC0415 - commands import what they use
    from enginehouse_backends.accounting.ledger import Ledger  # noqa: PLC0415

    return Ledger(url) if url else setup.open_ledger(load_settings())


def parse_period(since: str | None, until: str | None) -> Period:
    """Read the days of a report; raise :class:`ConfigurationError` when one is none."""
    from enginehouse_backends.accounting.views import Period  # noqa: PLC0415

    return Period(_parse_day(since, "since"), _parse_day(until, "until"))


def _parse_day(text: str | None, option: str) -> str | None:
    try:
        return None if text is None else date.fromisoformat(text).isoformat()
    except ValueError:
        raise ConfigurationError(refusal(f"--{option}", "must be a day, such as 2026-01-31", given=text)) from None


def parse_dimensions(text: str) -> tuple[Dimension, ...]:
    """Read what a report is grouped by; raise :class:`ConfigurationError` for an unknown name."""
    from enginehouse_backends.accounting.views import DIMENSIONS  # noqa: PLC0415

    chosen: list[Dimension] = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        name = "build_id" if word == "build" else word
        known = next((dimension for dimension in DIMENSIONS if dimension == name), None)
        if known is None:
            raise ConfigurationError(refusal("--by", "knows tenant, model, build and day", given=word))
        if known not in chosen:
            chosen.append(known)
    return tuple(chosen)


def money(amount: Pico | int | None) -> str | None:
    """Return an amount as a decimal string; None stays None, since unknown is not 0."""
    return None if amount is None else format_amount(amount)


def print_rows(rows: Sequence[dict[str, Any]], *, as_json: bool, as_csv: bool, if_none: str, title: str = "") -> None:
    """Print rows of one shape as a table, as JSON or as CSV."""
    if as_json:
        print_json(list(rows))
    elif as_csv:
        write_csv(rows)
    elif not rows:
        stdout.print(if_none, markup=False)
    else:
        names = [name for name in rows[0] if any(_says_something(row[name]) for row in rows)]
        table = Table(*(name.replace("_", " ") for name in names), title=title or None)
        for row in rows:
            table.add_row(*(_cell(row[name]) for name in names))
        # A table wider than the terminal is better wrapped by it than cut off in every cell.
        width = Console(width=_MAX_WIDTH).measure(table).maximum
        stdout.print(table, width=max(width, stdout.width), crop=False, no_wrap=True)


def _says_something(value: object) -> bool:
    """Whether a value is worth a column: counts of 0 are left to --json and --csv."""
    return value != 0


def _cell(value: object) -> str:
    if value is None:
        return "unknown"
    text = str(value)
    return text[:_NUM_ID_CHARS] if text.startswith("sha256:") else text


def write_csv(rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV on stdout; unknown values are empty."""
    if rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
