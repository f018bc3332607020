"""`enginehouse cost`: what was billed and what it cost to serve, side by side; the cost of a build; FOCUS export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from enginehouse_cli.console import print_json, stdout
from enginehouse_cli.ledger import (
    ByOption,
    CsvFlag,
    LedgerOption,
    SinceOption,
    UntilOption,
    money,
    open_ledger,
    parse_dimensions,
    parse_period,
    print_rows,
    write_csv,
)
from enginehouse_cli.options import JsonFlag

if TYPE_CHECKING:
    from enginehouse_backends.accounting.allocation import BuildCost, CostReport

BuildOption = Annotated[
    Optional[str], typer.Option("--build", help="The cost per million output tokens of this build, from its real runs.")
]
FocusFlag = Annotated[bool, typer.Option("--focus", help="Print a FOCUS 1.2 export (CSV, or JSON with --json).")]
AccountOption = Annotated[str, typer.Option("--billing-account", help="With --focus: BillingAccountId.")]

_NS_PER_HOUR = 3600 * 10**9


def cost(
    by: ByOption = "tenant",
    since: SinceOption = None,
    until: UntilOption = None,
    build: BuildOption = None,
    ledger: LedgerOption = None,
    billing_account: AccountOption = "enginehouse",
    *,
    focus: FocusFlag = False,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Show costs on both bases: usage (tokens x price) and allocation (machine time x rate, with idle)."""
    from enginehouse_backends.accounting import views  # noqa: PLC0415 - commands import what they use
    from enginehouse_backends.accounting.focus import focus_rows  # noqa: PLC0415

    period = parse_period(since, until)
    with open_ledger(ledger) as opened:
        if focus:
            rows = focus_rows(opened.database, billing_account, period)
            print_json(rows) if as_json else write_csv(rows)
            return
        if build is not None:
            _show_build(views.build_cost(opened.database, build, period), as_json=as_json, as_csv=as_csv)
            return
        report = views.cost(opened.database, parse_dimensions(by), period)
    _show_report(report, as_json=as_json, as_csv=as_csv)


def _show_build(found: BuildCost, *, as_json: bool, as_csv: bool) -> None:
    row = {
        "build_id": found.build_id,
        "requests": found.num_requests,
        "output_tokens": found.num_output_tokens,
        "machine_seconds": f"{found.machine_ns / 1e9:.3f}",
        "billed": money(found.billed),
        "billed_per_million_output_tokens": money(found.billed_per_million),
        "machine_cost_per_million_output_tokens": money(found.machine_per_million),
        "microjoules_per_output_token": found.energy_uj_per_token,
    }
    if as_json:
        print_json(row)
    else:
        print_rows([row], as_json=False, as_csv=as_csv, if_none="")


def _show_report(report: CostReport, *, as_json: bool, as_csv: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            **dict(zip(report.dimensions, line.group, strict=True)),
            "requests": line.num_requests,
            "output_tokens": line.num_output_tokens,
            "billed": money(line.billed),
            "unpriced_requests": line.num_unpriced,
            "machine_seconds": f"{line.machine_ns / 1e9:.3f}",
            "allocated": money(line.allocated),
        }
        for line in report.lines
    ]
    totals = {
        "currency": report.currency,
        "billed": money(report.billed),
        "machine_hours": f"{report.uptime_ns / _NS_PER_HOUR:.3f}",
        "idle_hours": f"{report.idle_ns / _NS_PER_HOUR:.3f}",
        "idle": money(report.idle),
        "machine_bill": money(report.machine_bill),
        "margin": money(report.margin),
    }
    if as_json:
        print_json({"lines": rows, "totals": totals})
        return
    print_rows(rows, as_json=False, as_csv=as_csv, if_none="no usage yet; the ledger is empty for these days.")
    if not as_csv:
        for name, value in totals.items():
            stdout.print(f"{name.replace('_', ' ')}: {'unknown' if value is None else value}", markup=False)
