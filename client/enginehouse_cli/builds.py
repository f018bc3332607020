"""`enginehouse builds`: what lies in the store; `push` and `pull` move builds to and from a remote one."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from enginehouse_cli import remote
from enginehouse_cli.console import print_json, stdout
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.settings import load_settings

app = typer.Typer()
remote.attach(app)


@app.callback(invoke_without_command=True)
def builds(context: typer.Context, *, as_json: JsonFlag = False) -> None:
    """List the builds, newest first; or move them to and from a remote store."""
    if context.invoked_subcommand is not None:
        return
    from enginehouse_builders.store import list_builds  # noqa: PLC0415

    found = list_builds(load_settings().store_dir)
    rows: list[dict[str, Any]] = [
        {
            "build_id": build.manifest.build_id,
            "name": build.manifest.model_name,
            "weights": build.manifest.weight_precision,
            "kv": build.manifest.kv_precision,
            "num_bytes": sum(record.num_bytes for record in build.manifest.files.values()),
            "created_at": build.manifest.created_at,
            "path": str(build.build_dir),
        }
        for build in found
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("name", "weights", "kv", "size", "created", "id")
    for row in rows:
        size = f"{row['num_bytes'] / 1e6:.0f} MB"
        table.add_row(row["name"], row["weights"], row["kv"], size, row["created_at"], row["build_id"][:19])
    stdout.print(table if rows else "no builds yet; make one with `enginehouse build MODEL`.")
