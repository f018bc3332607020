"""`enginehouse serve`: the tritonserver of this home, until Ctrl-C."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from enginehouse_cli.console import EXIT_FAILED, print_error, print_json, stderr, stdout
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.errors import ConfigurationError, EngineFailureError, refusal
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_backends.server.supervisor import ServerState
    from enginehouse_contract.release import Release


def serve(
    build: Annotated[
        Optional[str],
        typer.Argument(help="Build id, the start of one, a name, or a folder. Default: what is in production."),
    ] = None,
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="0 takes a free one.")] = 8001,
    http_port: Annotated[int, typer.Option("--http-port", help="0 takes a free one.")] = 8000,
    metrics_port: Annotated[int, typer.Option("--metrics-port", help="0 takes a free one.")] = 8002,
    parameter: Annotated[
        Optional[list[str]],
        typer.Option("--parameter", help="NAME=VALUE for the models' config.pbtxt; may be repeated."),
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Serve what is in production, or a build, on 127.0.0.1 until Ctrl-C or SIGTERM."""
    from enginehouse_builders.store import find_build  # noqa: PLC0415
    from enginehouse_cli.canary_guard import CanaryGuard  # noqa: PLC0415
    from enginehouse_cli.serving import serving  # noqa: PLC0415

    settings = load_settings()
    build_dir = None if build is None else find_build(settings.store_dir, build).build_dir
    with serving(
        settings,
        build_dir,
        parameters=parse_parameters(parameter or []),
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
    ) as (server, state, release):
        try:
            _announce(release, state, as_json=as_json)
            with CanaryGuard(settings, state):
                status = server.wait()
        except KeyboardInterrupt:
            stderr.print("stopping")
            return
    print_error(EngineFailureError(f"tritonserver ended by itself with status {status}; its log is {state.log_file}."))
    raise typer.Exit(EXIT_FAILED)


def _announce(release: Release, state: ServerState, *, as_json: bool) -> None:
    if as_json:
        row = {**asdict(state), "grpc_url": state.grpc_url, "http_url": state.http_url, "release": release.name}
        print_json(row)
        return
    stdout.print(
        f"serving {release.name}: {release.model_name} ({release.build_id[:19]})\n"
        f"  gRPC     {state.grpc_url}\n  HTTP     {state.http_url}\n"
        f"  metrics  http://127.0.0.1:{state.metrics_port}/metrics\n  log      {state.log_file}\n"
        "Ctrl-C stops it.",
        markup=False,
    )


def parse_parameters(texts: list[str]) -> dict[str, str]:
    """Read NAME=VALUE pairs; raise :class:`ConfigurationError` for one without a name."""
    pairs = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise ConfigurationError(refusal("--parameter", "must be NAME=VALUE", given=text))
        pairs[name] = value
    return pairs
