"""`enginehouse fleet`: the same change on several servers, in turn, halted at the first that fails."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from enginehouse_cli.console import print_error, print_json, progress_bar, stdout
from enginehouse_cli.ledger import print_rows
from enginehouse_cli.options import JsonFlag

if TYPE_CHECKING:
    from enginehouse_builders.fleet.hosts import CommandHost
    from enginehouse_builders.fleet.rollout import FleetReport, Host, Serving

app = typer.Typer(help="The same change on several servers, in turn.", no_args_is_help=True)

ServerOption = Annotated[
    Optional[list[str]],
    typer.Option("--server", help="A state folder of this host, or ssh://[user@]host[/state/folder]; may be repeated."),
]
FileOption = Annotated[Optional[Path], typer.Option("--file", help="YAML with a list `servers`.")]
WhyOption = Annotated[str, typer.Option("--why", help="For each server's history.")]


@app.command("status")
def fleet_status(server: ServerOption = None, file: FileOption = None, *, as_json: JsonFlag = False) -> None:
    """Show what every server has in production; 3 when one could not be asked."""
    from enginehouse_builders.fleet.rollout import look  # noqa: PLC0415 - commands import what they use

    hosts = _hosts(server, file)
    with progress_bar("fleet") as progress:
        report = look(hosts, progress)
    _show(report, as_json=as_json)


@app.command("promote")
def fleet_promote(
    build: Annotated[str, typer.Argument(help="A build's id, or its URL in a remote store: each server pulls it.")],
    server: ServerOption = None,
    file: FileOption = None,
    override: Annotated[
        Optional[str], typer.Option("--override", help="Pass over the gates, for this reason; it is recorded.")
    ] = None,
    why: WhyOption = "",
    *,
    gate: Annotated[bool, typer.Option("--gate", help="Run the build's gates on each server first.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Promote a build to production on each server in turn; run it again to go on where it halted.

    Every server is asked before the first is changed. A server that fails keeps its old release, and the rest is not
    touched. Exit codes: 0 all serve it, 1 one failed, 3 one could not be reached.
    """
    from enginehouse_builders.fleet.hosts import CommandHost  # noqa: PLC0415
    from enginehouse_builders.fleet.rollout import roll_out  # noqa: PLC0415

    options = [f"--why={why}"] if why else []
    options += [f"--override={override}"] if override is not None else []

    def promote(host: Host) -> Serving:
        assert isinstance(host, CommandHost), "they were read as such"
        return host.promote(build, options, with_gates=gate)

    hosts = _hosts(server, file)
    with progress_bar("fleet") as progress:
        report = roll_out(hosts, promote, progress=progress)
    _show(report, as_json=as_json)


@app.command("rollback")
def fleet_rollback(
    build_id: Annotated[str, typer.Argument(help="The build to take out of production, or the start of its id.")],
    server: ServerOption = None,
    file: FileOption = None,
    why: WhyOption = "",
    *,
    as_json: JsonFlag = False,
) -> None:
    """Go back to the release before, on every server that serves the given build; the others are left alone."""
    from enginehouse_builders.fleet.hosts import CommandHost  # noqa: PLC0415
    from enginehouse_builders.fleet.rollout import roll_out  # noqa: PLC0415

    start = "sha256:" + build_id.removeprefix("sha256").lstrip(":-")

    def roll_back(host: Host) -> Serving:
        assert isinstance(host, CommandHost), "they were read as such"
        serving = host.serving()
        if not serving.build_id.startswith(start):
            return serving
        return host.rollback([f"--why={why}"] if why else [])

    hosts = _hosts(server, file)
    with progress_bar("fleet") as progress:
        report = roll_out(hosts, roll_back, progress=progress)
    _show(report, as_json=as_json)


def _hosts(servers: list[str] | None, file: Path | None) -> list[CommandHost]:
    from enginehouse_builders.fleet.hosts import parse_host, read_hosts  # noqa: PLC0415
    from enginehouse_builders.fleet.rollout import require_distinct  # noqa: PLC0415

    command = _own_command()
    hosts = [parse_host(text, command) for text in servers or []]
    hosts += [] if file is None else read_hosts(file, command)
    require_distinct(hosts)
    return hosts


def _own_command() -> list[str]:
    """How this installation's `enginehouse` is run."""
    beside = Path(sys.executable).with_name("enginehouse")
    return [str(beside) if beside.is_file() else shutil.which("enginehouse") or "enginehouse"]


def _show(report: FleetReport, *, as_json: bool) -> None:
    if as_json:
        print_json({"hosts": [asdict(host) for host in report.hosts], "summary": report.summary})
    else:
        rows: list[dict[str, Any]] = [
            {
                "server": host.host,
                "outcome": host.outcome,
                "release": "?" if host.after is None else host.after.release or "none",
                "build_id": "?" if host.after is None else host.after.build_id[:19],
                "was": "?" if host.before is None else host.before.build_id[:19],
            }
            for host in report.hosts
        ]
        print_rows(rows, as_json=False, as_csv=False, if_none="")
        stdout.print(report.summary, markup=False)
    if report.exit_code:
        for host in report.hosts:
            if host.error:
                print_error(f"{host.host}: {host.error}")
        raise typer.Exit(report.exit_code)
