"""Watching a canary: its counts from the front door's metrics, its looks, and the rollback when it is worse.

The process of `enginehouse serve` runs the guard, so that a canary is judged whatever becomes of the command that began
it, and by one judge only. What the guard knows is kept in the release book for `--watch` and `stage show`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from enginehouse_backends.server.scrape import read_metrics
from enginehouse_builders.promotion.book import ReleaseBook
from enginehouse_builders.promotion.canary import CanaryPolicy, Interval, ReleaseCounts, histogram_median, look
from enginehouse_builders.promotion.journal import Operation, Routing
from enginehouse_builders.promotion.promoter import current_routing
from enginehouse_builders.promotion.records import Canary
from enginehouse_cli.promoting import promoting
from enginehouse_contract.errors import EnginehouseError
from enginehouse_contract.release import release_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from enginehouse_backends.server.scrape import Series
    from enginehouse_backends.server.supervisor import ServerState
    from enginehouse_contract.settings import Settings

PERIOD_S: Final = 2.0
_WHO: Final = "enginehouse serve"
_FAILURES: Final = frozenset({"error", "timeout"})  # a client that leaves has not been failed
_COUNTERS: Final = {
    "nv_llm_front_door_requests_total": "finish_reason",
    "nv_llm_front_door_time_to_first_token_ms_bucket": "le",
    "nv_llm_front_door_inter_token_latency_ms_bucket": "le",
    "nv_llm_cost_total": None,
    "nv_llm_machine_seconds_total": None,
    "gen_ai_token_usage_total": "gen_ai_token_type",
}
"""The front door's counters by release that a canary is judged by, and the label that tells a family's series apart."""

Totals = dict[str, dict[str, dict[str, float]]]  # release -> family -> label -> value


def read_totals(series: Sequence[Series], releases: Sequence[str]) -> Totals:
    """Return the counters of some releases as they are now."""
    totals: Totals = {release: {family: {} for family in _COUNTERS} for release in releases}
    for each in series:
        release = each.labels.get("release", "")
        if each.name in _COUNTERS and release in totals:
            label = _COUNTERS[each.name]
            key = "" if label is None else each.labels.get(label, "")
            family = totals[release][each.name]
            family[key] = family.get(key, 0.0) + each.value
    return totals


def counts_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> ReleaseCounts:
    """Return what one release did between two readings of its counters; ``{}`` stands for the beginning."""

    def grown(family: str) -> dict[str, float]:
        earlier = before.get(family, {})
        return {key: value - earlier.get(key, 0.0) for key, value in after.get(family, {}).items()}

    requests = grown("nv_llm_front_door_requests_total")
    tokens = grown("gen_ai_token_usage_total")
    return ReleaseCounts(
        num_requests=int(sum(count for reason, count in requests.items() if reason != "cancelled")),
        num_errors=int(sum(count for reason, count in requests.items() if reason in _FAILURES)),
        first_token_ms=_bins(grown("nv_llm_front_door_time_to_first_token_ms_bucket")),
        inter_token_ms=_bins(grown("nv_llm_front_door_inter_token_latency_ms_bucket")),
        amount=sum(grown("nv_llm_cost_total").values()),
        machine_s=sum(grown("nv_llm_machine_seconds_total").values()),
        num_output_tokens=int(tokens.get("output", 0)),
    )


def _bins(cumulative: Mapping[str, float]) -> dict[float, int]:
    """Prometheus' buckets hold all below their bound; here each holds its own."""
    bins: Counter[float] = Counter()
    below = 0.0
    for bound, count in sorted((math.inf if key == "+Inf" else float(key), value) for key, value in cumulative.items()):
        bins[bound] = int(count - below)
        below = count
    return dict(bins)


@dataclass(slots=True)
class _Watched:
    """What is known of one canary since the guard met it."""

    canary: Canary
    stable: int
    last: Totals
    intervals: list[Interval]
    num_looks: int = 0


class CanaryGuard:
    """Judges the canary of a home as long as a server runs; a context manager around its thread."""

    def __init__(self, settings: Settings, state: ServerState, *, period_s: float = PERIOD_S) -> None:
        self._settings = settings
        self._metrics_url = f"http://127.0.0.1:{state.metrics_port}/metrics"
        self._period_s = period_s
        self._watched: _Watched | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canary-guard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            # A server or a book that cannot be read now is read the next time.
            with contextlib.suppress(EnginehouseError), ReleaseBook(self._settings.home) as book:
                self.step(book)

    def step(self, book: ReleaseBook) -> None:
        """Read the counters, look at the canary when it is time, and roll it back when it is worse."""
        canary, production = book.canary(), book.stage("production")
        if canary is None or production is None:
            self._watched = None
            return
        names = [release_name(production.number), release_name(canary.release)]
        totals = read_totals(read_metrics(self._metrics_url), names)
        watched = self._watched
        if watched is None or watched.canary.started_at != canary.started_at:
            self._watched = _Watched(canary, production.number, totals, [])
            return
        moved = Interval(*(counts_between(watched.last[name], totals[name]) for name in names))
        if moved.canary.num_requests and moved.stable.num_requests:  # else the span grows until both did something
            watched.intervals.append(moved)
            watched.last = totals
        stable, tried = (counts_between(canary.baseline.get(name, {}), totals[name]) for name in names)
        policy = CanaryPolicy(min_requests=canary.min_requests)
        due = sum(tried.num_requests >= at for at in policy.looks)
        status: dict[str, Any] = book.fact("canary_status") or {"verdict": "waiting", "regressions": []}
        if due > watched.num_looks and status["verdict"] == "waiting":
            watched.num_looks = due
            found = look(policy, canary.share, stable, tried, watched.intervals)
            status["regressions"] = [str(regression) for regression in found]
            status["verdict"] = "regressed" if found else "passed" if due == policy.num_looks else "waiting"
        status |= {"looks": watched.num_looks, "stable": summary(stable), "canary": summary(tried)}
        book.set_fact("canary_status", status)
        if status["verdict"] == "regressed":
            self._roll_back("; ".join(status["regressions"]))

    def _roll_back(self, why: str) -> None:
        with promoting(self._settings, "the rollback of a canary", report=lambda _: None) as promotion:
            before = current_routing(promotion.book)
            if before.canary is None:
                return
            operation = Operation(
                action="canary_end",
                stage="production",
                target=before.stable,
                before=before,
                after=Routing(before.stable),
                who=_WHO,
                why=f"{release_name(before.canary)} was worse: {why}",
            )
            promotion.promoter.run(operation)


def summary(counts: ReleaseCounts) -> dict[str, Any]:
    """Return the figures that are shown of a release."""
    requests = counts.num_requests
    return {
        "requests": requests,
        "errors": counts.num_errors,
        "ttft_ms": _finite(histogram_median(counts.first_token_ms)),
        "itl_ms": _finite(histogram_median(counts.inter_token_ms)),
        "price_per_request": counts.amount / requests if requests and counts.amount else None,
        "machine_s_per_token": counts.machine_s / counts.num_output_tokens if counts.num_output_tokens else None,
    }


def baseline_of(series: Sequence[Series], routing: Routing) -> dict[str, Any]:
    """Return the counters of a routing's releases when its canary begins."""
    return dict(read_totals(series, [release_name(number) for number in routing.releases]))


def canary_row(canary: Canary, status: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a canary as JSON has it."""
    row = {name: value for name, value in asdict(canary).items() if name != "baseline"}
    return {**row, "release": release_name(canary.release), **(status or {"verdict": "waiting"})}


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
