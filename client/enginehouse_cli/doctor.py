"""`enginehouse doctor`: whether this host can serve, and what to do where it cannot."""

from __future__ import annotations

from dataclasses import asdict

import typer

from enginehouse_cli.console import EXIT_FAILED, print_json, stdout
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.settings import load_settings


def doctor(*, as_json: JsonFlag = False) -> None:
    """Check everything that building and serving need."""
    from enginehouse_backends.server.binary import Check, diagnose  # noqa: PLC0415

    settings = load_settings()
    checks = [*diagnose(), Check("state folder", ok=True, found=str(settings.home))]
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            stdout.print(f"{'ok  ' if check.ok else 'FAIL'} {check.name:<{width}}  {check.found}", markup=False)
            if not check.ok:
                stdout.print(f"     {check.advice}", markup=False)
    if not all(check.ok for check in checks):
        raise typer.Exit(EXIT_FAILED)
