"""What every command that changes what is served has in common: the book, the lock, the server of this home."""

from __future__ import annotations

import getpass
import socket
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from enginehouse_backends.server.administration import TritonAdministration
from enginehouse_backends.server.supervisor import read_state
from enginehouse_builders.promotion.book import ReleaseBook
from enginehouse_builders.promotion.lock import exclusive
from enginehouse_builders.promotion.promoter import Outcome, Promoter
from enginehouse_cli.console import stderr
from enginehouse_cli.live_server import TritonLiveServer
from enginehouse_contract.errors import EngineUnavailableError
from enginehouse_contract.release import release_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from enginehouse_contract.settings import Settings


@dataclass(frozen=True, slots=True)
class Promotion:
    """An open book and the running server that it is about."""

    book: ReleaseBook
    server: TritonLiveServer
    promoter: Promoter
    recovered: str | None  # what an earlier command left behind, and what was done about it


@contextmanager
def promoting(
    settings: Settings, what: str, *, report: Callable[[str], None] | None = None, drain_timeout_s: float = 300.0
) -> Iterator[Promotion]:
    """Hold the lock, find the server, end what was cut short, and yield the means to change what is served.

    Raises :class:`EngineUnavailableError` when no server runs, :class:`PromotionError` when another command is at it or
    the server is not this home's.
    """
    with exclusive(settings.home, f"enginehouse {what}"), ReleaseBook(settings.home) as book:
        state = read_state(settings.home)
        if state is None:
            msg = f"no server runs on {settings.home}; start one with `enginehouse serve`."
            raise EngineUnavailableError(msg)
        with TritonAdministration(state.grpc_url) as administration:
            server = TritonLiveServer(settings, state, administration, book.fact("front_door") or {})
            server.require_ours()
            promoter = Promoter(book, server, report=report or _say, drain_timeout_s=drain_timeout_s)
            recovered = promoter.recover()
            if recovered:
                stderr.print(f"note: {recovered}", style="yellow", markup=False)
            yield Promotion(book, server, promoter, recovered)


def who_asks() -> str:
    """Return who runs this command, for the history: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def outcome_row(outcome: Outcome, build_id: str, recovered: str | None) -> dict[str, Any]:
    """Return what a change came to, as JSON has it."""
    operation = outcome.operation
    return {
        "action": operation.action,
        "stage": operation.stage,
        "release": release_name(operation.target),
        "build_id": build_id,
        "from_release": release_name(operation.before.stable),
        "swap": operation.swap,
        "load_s": _rounded(outcome.load_s),
        "flip_s": _rounded(outcome.switch_s),
        "ready_to_switched_s": _rounded(outcome.ready_to_switched_s),
        "gap_s": _rounded(outcome.gap_s),
        "drain_s": _rounded(outcome.drain_s),
        "unloaded": [release_name(number) for number in outcome.unloaded],
        "still_open": {release_name(number): count for number, count in outcome.still_open.items()},
        "canary": None if operation.after.canary is None else asdict(operation.after),
        "recovered": recovered,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _say(words: str) -> None:
    stderr.print(f"  {words}", markup=False, style="dim")
