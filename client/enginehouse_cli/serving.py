"""Starting the server of this home: shared by `serve` and `demo`.

It serves the production stage's release. A build that is named, or other settings, make a new release, which is in
production once the server answers from it.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from enginehouse_backends.server.release_models import ALIASES, render_live, split_parameters
from enginehouse_backends.server.supervisor import ServerOptions, ServerState, TritonServer, refuse_second_server
from enginehouse_builders.promotion.book import ReleaseBook
from enginehouse_builders.promotion.journal import Operation, Routing
from enginehouse_builders.promotion.lock import exclusive
from enginehouse_builders.promotion.promoter import end_operation_without_server
from enginehouse_builders.promotion.records import Change, StageEvent
from enginehouse_builders.store import newest_build
from enginehouse_cli.candidate import require_build
from enginehouse_cli.console import progress_bar, stderr
from enginehouse_cli.promoting import who_asks
from enginehouse_client import FRONT_DOOR
from enginehouse_contract.manifest import verify_build

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from types import FrameType

    from enginehouse_contract.release import Release
    from enginehouse_contract.settings import Settings


_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def serving(
    settings: Settings,
    build_dir: Path | None = None,
    *,
    parameters: Mapping[str, str] | None = None,
    grpc_port: int = 0,
    http_port: int = 0,
    metrics_port: int = 0,
) -> Iterator[tuple[TritonServer, ServerState, Release]]:
    """Render the live repository, start the server, and stop it at the end; SIGTERM ends it like Ctrl-C.

    Raises :class:`ServerStartError` where a server runs on this state folder already, leaving its repository alone.
    """
    refuse_second_server(settings.home)
    server = None
    previous = {kind: signal.signal(kind, _interrupt) for kind in _ENDING_SIGNALS}
    try:
        with exclusive(settings.home, "enginehouse serve"), ReleaseBook(settings.home) as book:
            if recovered := end_operation_without_server(book):
                stderr.print(f"note: {recovered}", style="yellow", markup=False)
            release, front_door = _release_to_serve(settings, book, build_dir, parameters or {})
            render_live(settings.repository_dir, release, [], front_door)
            options = ServerOptions(
                repository=settings.repository_dir,
                build_id=release.build_id,
                models=(*release.models, *ALIASES, FRONT_DOOR),
                grpc_port=grpc_port,
                http_port=http_port,
                metrics_port=metrics_port,
            )
            server = TritonServer(settings, options)
            with progress_bar("server") as report:
                state = server.start(lambda stage: report(stage, 0.0))
            _record_start(book, release, front_door)
        yield server, state, release
    finally:
        for kind in _ENDING_SIGNALS:
            signal.signal(kind, signal.SIG_IGN)  # a second Ctrl-C must not leave half a server behind
        if server is not None:
            server.stop()
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def _release_to_serve(
    settings: Settings, book: ReleaseBook, build_dir: Path | None, parameters: Mapping[str, str]
) -> tuple[Release, dict[str, str]]:
    """Return production's release, or the one of another build or other settings that were asked for.

    Without either a new state folder serves the newest build.
    """
    of_release, front_door = split_parameters(parameters)
    production = book.stage("production")
    if build_dir is None and production is not None:
        if not parameters:
            require_build(production, digests=False)
            return production, book.fact("front_door") or {}
        build_dir = production.build_dir
    build_dir = newest_build(settings.store_dir).build_dir if build_dir is None else build_dir
    manifest = verify_build(build_dir, digests=False)
    release = book.add_release(manifest.build_id, build_dir, manifest.model_name, of_release, who_asks())
    return release, front_door


def _record_start(book: ReleaseBook, release: Release, front_door: Mapping[str, str]) -> None:
    """Write down what the server that answers now was started with."""
    production = book.stage("production")
    book.set_fact("front_door", dict(front_door))
    if production != release:
        routing = Routing(release.number)
        event = StageEvent(
            stage="production",
            action="serve",
            from_release=None if production is None else production.number,
            to_release=release.number,
            who=who_asks(),
            why="named when the server was started",
        )
        book.commit(Operation("promote", "production", release.number, routing, routing, who_asks()), Change(event))
    book.restart(release)


def _interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
    raise KeyboardInterrupt
