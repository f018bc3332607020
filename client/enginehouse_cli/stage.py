"""`enginehouse stage show|history`: where the stages point, and how they came there."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Optional

import typer

from enginehouse_cli.console import print_json, stdout
from enginehouse_cli.ledger import print_rows
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.release import STAGES, release_name
from enginehouse_contract.settings import load_settings

app = typer.Typer(help="Where staging and production point, and their history.", no_args_is_help=True)

StageArgument = Annotated[Optional[str], typer.Argument(help="staging or production. Default: both.")]


@app.command("show")
def stage_show(stage: StageArgument = None, *, as_json: JsonFlag = False) -> None:
    """Show the release of each stage, and a canary that is on."""
    from enginehouse_builders.promotion.book import ReleaseBook  # noqa: PLC0415 - commands import what they use
    from enginehouse_builders.promotion.records import parse_stage  # noqa: PLC0415
    from enginehouse_cli.canary_guard import canary_row  # noqa: PLC0415
    from enginehouse_cli.releases import release_rows  # noqa: PLC0415

    settings = load_settings()
    wanted = STAGES if stage is None else (parse_stage(stage),)
    with ReleaseBook(settings.home) as book:
        rows = {row["release"]: row for row in release_rows(settings, book)}
        pointed = {name: book.stage(name) for name in wanted}
        canary, status, unfinished = book.canary(), book.fact("canary_status"), book.unfinished()
    shown: dict[str, Any] = {name: None if at is None else rows[at.name] for name, at in pointed.items()}
    shown["canary"] = None if canary is None else canary_row(canary, status)
    shown["unfinished"] = None if unfinished is None else f"{unfinished.action} {release_name(unfinished.target)}"
    if as_json:
        print_json(shown)
        return
    for name in wanted:
        row = shown[name]
        text = f"{row['release']}  {row['name']}  {row['build_id'][:19]}  {row['state']}" if row else "nothing yet"
        stdout.print(f"{name:11} {text}", markup=False)
    if canary is not None:
        words = f"{canary.share:.0%} by {canary.by}, {shown['canary']['verdict']}"
        stdout.print(f"canary      {release_name(canary.release)}  {words}", markup=False)
    if unfinished is not None:
        stdout.print(f"unfinished  {shown['unfinished']}: the next promote or rollback ends it", markup=False)


@app.command("history")
def stage_history(stage: StageArgument = None, *, as_json: JsonFlag = False) -> None:
    """Show what happened to the stages, oldest first."""
    from enginehouse_builders.promotion.book import ReleaseBook  # noqa: PLC0415 - commands import what they use
    from enginehouse_builders.promotion.records import parse_stage  # noqa: PLC0415

    with ReleaseBook(load_settings().home) as book:
        events = book.history(None if stage is None else parse_stage(stage))
    rows: list[dict[str, Any]] = [
        {
            "at": event.at,
            **{name: value for name, value in asdict(event).items() if name not in {"at", "sequence"}},
            "from_release": None if event.from_release is None else release_name(event.from_release),
            "to_release": release_name(event.to_release),
        }
        for event in events
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["at"] = row["at"][:19]
        row["gates"] = ", ".join(f"record {gate['record']}" for gate in row["gates"]) or "none"
        row["from_release"] = row["from_release"] or ""
    print_rows(rows, as_json=False, as_csv=False, if_none="no history yet.")
