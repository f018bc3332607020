"""What is plotted of a run, and the points of it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from enginehouse_builders.bench.figures import tokens_in_window
from enginehouse_builders.bench.svg import Limit, Series, plot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from enginehouse_builders.bench.records import RequestRecord
    from enginehouse_builders.bench.run import BenchRun
    from enginehouse_builders.bench.svg import Point

_MS_PER_S: Final = 1000
_MAX_BINS: Final = 60
_MIN_BIN_S: Final = 0.25
_TAIL: Final = 0.995  # of the gaps; what is beyond would squeeze the rest into a corner


def draw_plots(run: BenchRun) -> list[tuple[str, str]]:
    """Return titles and SVG elements, in the order they are read."""
    start_s, end_s = run.window_s
    slo = dict(run.slo.limits_s)
    answered = [record for record in run.measured if record.error_kind is None]
    ttft_ms = [_MS_PER_S * value for record in answered if (value := record.ttft_s) is not None]
    gaps_ms = [_MS_PER_S * gap for record in answered for gap in record.itl_s]
    tail_ms = float(np.quantile(gaps_ms, _TAIL)) if gaps_ms else None
    window = [] if run.duration_s is None else [Limit("x", end_s, "end of the measured time")]
    if start_s > 0:
        window.insert(0, Limit("x", start_s, "measured from here"))
    last_s = max((record.ended_at_s for record in run.records), default=0.0)
    plots = [
        ("Time to first token", "ms", cdf(ttft_ms), _slo_limit("x", slo, "ttft"), None),
        ("Inter-token latency", "ms", cdf(gaps_ms), _slo_limit("x", slo, "itl"), tail_ms),
    ]
    drawn = [
        (
            f"{title}: distribution",
            plot(
                title,
                f"{title.lower()}, {unit}",
                "share of values",
                [Series(points, "step")],
                limits=limits,
                x_max=x_max,
                y_max=1.0,
            ),
        )
        for title, unit, points, limits, x_max in plots
    ]
    drawn += [
        (
            "Time to first token over time",
            _over_time("time to first token, ms", run, lambda r: r.ttft_s, _slo_limit("y", slo, "ttft")),
        ),
        ("End to end over time", _over_time("end to end, ms", run, lambda r: r.e2e_s, _slo_limit("y", slo, "e2e"))),
        (
            "Throughput over time",
            plot(
                "Throughput",
                "time, s",
                "output tokens/s",
                [Series(throughput(run.records, last_s), "step")],
                limits=window,
                x_max=last_s or None,
            ),
        ),
        (
            "Requests in flight",
            plot(
                "Requests in flight",
                "time, s",
                "requests",
                [Series(in_flight(run.records), "step")],
                limits=window,
                x_max=last_s or None,
            ),
        ),
    ]
    return drawn


def cdf(values: Sequence[float]) -> list[Point]:
    """Return the empirical distribution function as steps: (value, share of values up to it)."""
    ordered = sorted(values)
    return (
        [(0.0, 0.0), *((value, (index + 1) / len(ordered)) for index, value in enumerate(ordered))] if ordered else []
    )


def throughput(records: Sequence[RequestRecord], last_s: float) -> list[Point]:
    """Return output tokens per second in equal slices of time, as steps."""
    if last_s <= 0:
        return []
    num_bins = int(min(max(last_s / _MIN_BIN_S, 1), _MAX_BINS))
    edges = np.linspace(0.0, last_s, num_bins + 1)
    bin_s = last_s / num_bins
    points = [(0.0, 0.0)]
    for low, high in pairwise(edges):
        rate = tokens_in_window(records, float(low), float(np.nextafter(high, low))) / bin_s
        points += [(float(low), rate), (float(high), rate)]
    return points


def in_flight(records: Sequence[RequestRecord]) -> list[Point]:
    """Return how many requests were between sent and ended, as steps."""
    changes = sorted([(record.sent_at_s, 1) for record in records] + [(record.ended_at_s, -1) for record in records])
    return list(_running_sum(changes))


def _running_sum(changes: Sequence[tuple[float, int]]) -> Iterator[Point]:
    count = 0
    yield 0.0, 0.0
    for at_s, change in changes:
        count += change
        yield at_s, float(count)


def _over_time(label: str, run: BenchRun, value_s: Callable[[RequestRecord], float | None], limits: list[Limit]) -> str:
    def points(*, is_warmup: bool) -> list[Point]:
        return [
            (record.intended_at_s, _MS_PER_S * value)
            for record in run.records
            if record.is_warmup == is_warmup and record.error_kind is None and (value := value_s(record)) is not None
        ]

    failed = [(record.intended_at_s, 0.0) for record in run.records if record.error_kind is not None]
    series = [Series(points(is_warmup=True), "dots", is_muted=True), Series(points(is_warmup=False), "dots")]
    last_s = max((record.ended_at_s for record in run.records), default=0.0)
    every = [*series, Series(failed, "crosses")]
    return plot(label, "intended send time, s", label, every, limits=limits, x_max=last_s or None)


def _slo_limit(axis: str, slo: dict[str, float], metric: str) -> list[Limit]:
    if metric not in slo:
        return []
    return [Limit("x" if axis == "x" else "y", _MS_PER_S * slo[metric], f"SLO {_MS_PER_S * slo[metric]:g} ms")]
