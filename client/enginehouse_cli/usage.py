"""`enginehouse usage`: tokens, requests and energy, by tenant, model, build and day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

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
)
from enginehouse_cli.options import JsonFlag

if TYPE_CHECKING:
    from enginehouse_backends.accounting.records import UsageRecord

RecordsOption = Annotated[
    Optional[int], typer.Option("--records", min=1, help="List this many single requests instead, newest first.")
]
TenantOption = Annotated[Optional[str], typer.Option("--tenant", help="With --records: of this tenant only.")]

_IF_NONE = "no usage yet; the ledger is empty for these days."


def usage(
    by: ByOption = "tenant,model",
    since: SinceOption = None,
    until: UntilOption = None,
    records: RecordsOption = None,
    tenant: TenantOption = None,
    ledger: LedgerOption = None,
    *,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Show what was used: sums by group, or single requests."""
    from enginehouse_backends.accounting import views  # noqa: PLC0415 - commands import what they use

    with open_ledger(ledger) as opened:
        if records is not None:
            found = views.records(opened.database, tenant=tenant, limit=records)
            print_rows([record_row(record) for record in found], as_json=as_json, as_csv=as_csv, if_none=_IF_NONE)
            return
        dimensions = parse_dimensions(by)
        lines = views.usage(opened.database, dimensions, parse_period(since, until))
        currency = views.currency_of(opened.price_list())
    rows: list[dict[str, Any]] = [
        {
            **dict(zip(dimensions, line.group, strict=True)),
            "requests": line.num_requests,
            "input_tokens": line.usage.num_input_tokens,
            "cached_tokens": line.usage.num_input_cached_tokens,
            "output_tokens": line.usage.num_output_tokens,
            "draft_rejected_tokens": line.usage.num_draft_rejected_tokens,
            "recomputed_tokens": line.usage.num_recomputed_tokens,
            "amount": money(line.amount),
            "currency": currency,
            "unpriced_requests": line.num_unpriced,
            "energy_joules": f"{line.energy_uj / 1e6:.3f}",
            "estimated_requests": line.num_estimated,
            "recovered_requests": line.num_recovered,
        }
        for line in lines
    ]
    print_rows(rows, as_json=as_json, as_csv=as_csv, if_none=_IF_NONE)


def record_row(record: UsageRecord) -> dict[str, Any]:
    """Return one request as a row."""
    from enginehouse_backends.accounting.windows import format_moment  # noqa: PLC0415

    share = record.share
    return {
        "settled_at": format_moment(record.settled_at_ns),
        "tenant": record.key.tenant,
        "request_id": record.key.request_id,
        "attempt": record.key.attempt,
        "model": record.model,
        "build_id": record.build_id,
        "finish_reason": record.finish_reason,
        "input_tokens": record.usage.num_input_tokens,
        "cached_tokens": record.usage.num_input_cached_tokens,
        "output_tokens": record.usage.num_output_tokens,
        "amount": money(record.amount),
        "currency": record.currency,
        "price_book": record.book_id,
        "energy_joules": None if share is None else f"{share.energy_uj / 1e6:.6f}",
        "is_estimated": None if share is None else share.is_estimated,
        "is_recovered": record.is_recovered,
    }
