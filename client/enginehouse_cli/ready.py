"""`enginehouse ready`: whether a server really serves, for probes and pipelines."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from enginehouse_cli.options import JsonFlag, UrlOption, find_server, show
from enginehouse_contract.errors import EngineUnavailableError, refusal


def ready(
    url: UrlOption = None,
    build: Annotated[Optional[str], typer.Option("--build", help="Fail unless this build serves.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the answer.")] = 5.0,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Ask the front door whether its engines answer. Exit code 0: they do; 3: they do not, or nobody answers."""
    from enginehouse_client import Client  # noqa: PLC0415 - commands import what they use

    with Client(find_server(url), max_retries=0) as client:
        build_id = client.probe(timeout)
    if build is not None and not build_id.startswith("sha256:" + build.removeprefix("sha256:")):
        raise EngineUnavailableError(refusal("--build", "is not the build that serves", limit=build_id, given=build))
    show({"build_id": build_id}, as_json=as_json, text=f"serving {build_id}")
