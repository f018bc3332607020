"""Starting and watching a canary: the part of `enginehouse promote --canary`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.promotion.book import ReleaseBook
from enginehouse_cli.canary_guard import PERIOD_S, canary_row
from enginehouse_cli.console import stderr
from enginehouse_contract.errors import ConfigurationError, EngineUnavailableError, PromotionError, refusal
from enginehouse_contract.release import release_name

if TYPE_CHECKING:
    from enginehouse_contract.settings import Settings

_STALE_S: Final = 30.0


def parse_share(text: str) -> float:
    """Read ``10%`` or ``0.1``; raise :class:`ConfigurationError` for what is no share between nothing and all."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ConfigurationError(refusal("--canary", "must be a share of the requests, such as 10%", given=text))
    return share


def parse_by(text: str) -> str:
    """Read what sticks to a release; raise :class:`ConfigurationError` for another word."""
    if text not in {"tenant", "request"}:
        raise ConfigurationError(refusal("--by", "must be tenant or request", given=text))
    return text


def watch(settings: Settings, release: int) -> dict[str, Any]:
    """Show a canary until it is judged; return it as it was then.

    Raises :class:`PromotionError` when it was rolled back, with the reason of the history, and
    :class:`EngineUnavailableError` when nobody judges it any more.
    """
    shown, changed_s = "", time.monotonic()
    while True:
        with ReleaseBook(settings.home) as book:
            canary, status = book.canary(), book.fact("canary_status")
            last = book.history("production")[-1]
        if canary is None or canary.release != release:
            if last.action == "canary_end":
                raise PromotionError(f"the canary of {release_name(release)} was rolled back: {last.why or last.who}")
            return {"release": release_name(release), "verdict": "ended", "by": last.action}
        if status is not None and (line := _line(status)) != shown:
            shown, changed_s = line, time.monotonic()
            stderr.print(f"  {line}", markup=False, style="dim")
        if status is not None and status["verdict"] == "passed":
            return canary_row(canary, status)
        if time.monotonic() - changed_s > _STALE_S and not _is_served(settings):
            raise EngineUnavailableError(f"no server runs on {settings.home} any more; its canary ended with it.")
        time.sleep(PERIOD_S / 2)


def _is_served(settings: Settings) -> bool:
    from enginehouse_backends.server.supervisor import read_state  # noqa: PLC0415 - commands import what they use

    return read_state(settings.home) is not None


def _line(status: dict[str, Any]) -> str:
    sides = []
    for side in ("stable", "canary"):
        figures = status[side]
        latencies = f"TTFT {_ms(figures['ttft_ms'])}, ITL {_ms(figures['itl_ms'])}"
        sides.append(f"{side} {figures['requests']} requests, {figures['errors']} errors, {latencies}")
    return f"{' | '.join(sides)} | look {status['looks']}: {status['verdict']}"


def _ms(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f} ms"
