"""`enginehouse budget`: limits on what a tenant, or one of its keys, may spend, ask and compute."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from enginehouse_cli.console import stdout
from enginehouse_cli.ledger import CsvFlag, LedgerOption, money, open_ledger, print_rows
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.money import parse_amount

app = typer.Typer(help="Limits per tenant and key on spend, requests and tokens.", no_args_is_help=True)

WindowArgument = Annotated[str, typer.Argument(help="minute, hour, day, week or month.")]
KeyOption = Annotated[str, typer.Option("--key", help="One of the tenant's keys; default: all of them together.")]
SpendOption = Annotated[Optional[str], typer.Option(help='Money, such as "12.50".')]
CountOption = Annotated[Optional[int], typer.Option(min=0)]


@app.command("list")
def list_budgets(ledger: LedgerOption = None, *, as_json: JsonFlag = False, as_csv: CsvFlag = False) -> None:
    """List every limit."""
    with open_ledger(ledger) as opened:
        budgets = opened.budgets()
    rows: list[dict[str, Any]] = [
        {
            "tenant": budget.tenant,
            "key": budget.key_id,
            "window": budget.window,
            "time_zone": budget.time_zone,
            "soft_spend": money(budget.spend.soft),
            "hard_spend": money(budget.spend.hard),
            "soft_requests": budget.requests.soft,
            "hard_requests": budget.requests.hard,
            "soft_tokens": budget.tokens.soft,
            "hard_tokens": budget.tokens.hard,
        }
        for budget in budgets
    ]
    if not as_json and not as_csv:
        rows = [{name: "none" if value is None else value for name, value in row.items()} for row in rows]
    print_rows(rows, as_json=as_json, as_csv=as_csv, if_none="no budgets; every tenant may use what there is.")


@app.command("set")
def set_budget(
    tenant: str,
    window: WindowArgument,
    key: KeyOption = "",
    time_zone: Annotated[str, typer.Option(help="Where days, weeks and months begin.")] = "UTC",
    hard_spend: SpendOption = None,
    soft_spend: SpendOption = None,
    hard_requests: CountOption = None,
    soft_requests: CountOption = None,
    hard_tokens: CountOption = None,
    soft_tokens: CountOption = None,
    ledger: LedgerOption = None,
) -> None:
    """Set the limits of a tenant (or one of its keys) in a window; running servers keep to them at once."""
    from enginehouse_backends.accounting.budgets import Budget, Limit  # noqa: PLC0415 - commands import what they use
    from enginehouse_backends.accounting.windows import WINDOW_NAMES  # noqa: PLC0415

    chosen = next((name for name in WINDOW_NAMES if name == window), None)
    if chosen is None:
        raise ConfigurationError(refusal("window", f"must be one of {', '.join(WINDOW_NAMES)}", given=window))
    budget = Budget(
        tenant,
        chosen,
        key,
        time_zone,
        spend=Limit(_amount(soft_spend, "--soft-spend"), _amount(hard_spend, "--hard-spend")),
        requests=Limit(soft_requests, hard_requests),
        tokens=Limit(soft_tokens, hard_tokens),
    )
    with open_ledger(ledger) as opened:
        opened.set_budget(budget)
    stdout.print(f"set: {tenant} {key or '(all keys)'} per {window}", markup=False)


@app.command("remove")
def remove_budget(tenant: str, window: WindowArgument, key: KeyOption = "", ledger: LedgerOption = None) -> None:
    """Remove the limits of a tenant (or one of its keys) in a window."""
    with open_ledger(ledger) as opened:
        if not opened.remove_budget(tenant, key, window):
            raise ConfigurationError(refusal("budget", "is not set", given=f"{tenant} {key} per {window}"))
    stdout.print("removed", markup=False)


def _amount(text: str | None, option: str) -> int | None:
    return None if text is None else parse_amount(text, option)
