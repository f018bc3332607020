"""Starting the server of one build: shared by `serve` and `demo`."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from enginehouse_backends.server.repository import render_repository
from enginehouse_backends.server.supervisor import ServerOptions, ServerState, TritonServer
from enginehouse_contract.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import FrameType

    from enginehouse_contract.settings import Settings


@contextmanager
def serving(
    settings: Settings,
    build_dir: Path,
    *,
    parameters: Mapping[str, str] | None = None,
    grpc_port: int = 0,
    http_port: int = 0,
    metrics_port: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Iterator[tuple[TritonServer, ServerState]]:
    """Render the repository, start the server, and stop it at the end; SIGTERM ends it like Ctrl-C."""
    render_repository(settings.repository_dir, build_dir, parameters)
    options = ServerOptions(
        repository=settings.repository_dir,
        build_id=read_manifest(build_dir).build_id,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
    )
    server = TritonServer(settings, options)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield server, server.start(progress)
    finally:
        server.stop()
        signal.signal(signal.SIGTERM, previous)


def _interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
    raise KeyboardInterrupt
