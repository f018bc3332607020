"""Starting the server of one build: shared by `serve` and `demo`."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from enginehouse_backends.server.repository import render_repository
from enginehouse_backends.server.supervisor import ServerOptions, ServerState, TritonServer, refuse_second_server
from enginehouse_cli.console import progress_bar
from enginehouse_contract.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import FrameType

    from enginehouse_contract.settings import Settings


_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def serving(
    settings: Settings,
    build_dir: Path,
    *,
    parameters: Mapping[str, str] | None = None,
    grpc_port: int = 0,
    http_port: int = 0,
    metrics_port: int = 0,
) -> Iterator[tuple[TritonServer, ServerState]]:
    """Render the repository, start the server, and stop it at the end; SIGTERM ends it like Ctrl-C.

    Raises :class:`ServerStartError` where a server runs on this state folder already, leaving its repository alone.
    """
    refuse_second_server(settings.home)
    render_repository(settings.repository_dir, build_dir, parameters)
    options = ServerOptions(
        repository=settings.repository_dir,
        build_id=read_manifest(build_dir).build_id,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
    )
    server = TritonServer(settings, options)
    previous = {kind: signal.signal(kind, _interrupt) for kind in _ENDING_SIGNALS}
    try:
        with progress_bar("server") as report:
            state = server.start(lambda stage: report(stage, 0.0))
        yield server, state
    finally:
        for kind in _ENDING_SIGNALS:
            signal.signal(kind, signal.SIG_IGN)  # a second Ctrl-C must not leave half a server behind
        server.stop()
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def _interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
    raise KeyboardInterrupt
