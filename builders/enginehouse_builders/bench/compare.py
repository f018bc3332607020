"""Two runs side by side: ratios, how sure they are, and what else differs between the runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from enginehouse_builders.bench.figures import cached_input_share, tokens_in_window
from enginehouse_builders.bench.statistics import Ratio, bootstrap_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from enginehouse_builders.bench.records import RequestRecord
    from enginehouse_builders.bench.run import BenchRun

    Rows = Sequence[Sequence[float]]

Verdict = Literal["within noise", "better", "worse", "unknown"]

_NUM_SLICES: Final = 20  # of the window, for rates
_MIN_ROWS: Final = 5  # fewer say nothing about their own spread
_MAX_CACHED_DIFFERENCE: Final = 0.05
_HOST_KEYS: Final = ("cpu", "num_cpus", "gpus", "protocol")


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One metric of A and B; ``verdict`` is B's beside A. ``ratio`` is None where there are too few values."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    a: float
    b: float
    ratio: Ratio | None

    @property
    def verdict(self) -> Verdict:
        """What can be said of B."""
        if self.ratio is None:
            return "unknown"
        if self.ratio.is_within_noise:
            return "within noise"
        return "better" if (self.ratio.ratio < 1) == (self.better == "lower") else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs' metrics, the parameters that differ (name -> A's and B's), and what to distrust."""

    metrics: tuple[ComparedMetric, ...]
    differing_parameters: dict[str, tuple[Any, Any]]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "metrics": [{**asdict(metric), "verdict": metric.verdict} for metric in self.metrics],
            "differing_parameters": self.differing_parameters,
            "warnings": self.warnings,
        }


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    unit: str
    better: Literal["lower", "higher"]
    rows: Callable[[BenchRun], Rows]
    statistic: Callable[[NDArray[Any]], float]
    num_values_needed: int = 1


def _ok(run: BenchRun) -> list[RequestRecord]:
    return [record for record in run.measured if record.error_kind is None]


def _values(of: Callable[[RequestRecord], float | None]) -> Callable[[BenchRun], Rows]:
    return lambda run: [(value,) for record in _ok(run) if (value := of(record)) is not None]


def _slices(count: Callable[[BenchRun, float, float], float]) -> Callable[[BenchRun], Rows]:
    """Return a rate per second in each slice of the window."""

    def rows(run: BenchRun) -> Rows:
        start_s, end_s = run.window_s
        edges = np.linspace(start_s, end_s, _NUM_SLICES + 1)
        slice_s = (end_s - start_s) / _NUM_SLICES
        if slice_s <= 0:
            return []
        edges[-1] = np.nextafter(end_s, np.inf)  # slices are half open, the window is not
        return [(count(run, a, np.nextafter(b, a)) / slice_s,) for a, b in pairwise(edges)]

    return rows


def _num_ended(run: BenchRun, start_s: float, end_s: float) -> float:
    return sum(record.is_complete and start_s <= record.ended_at_s <= end_s for record in run.counted)


def _num_good(run: BenchRun, start_s: float, end_s: float) -> float:
    return sum(run.slo.is_met_by(record) and start_s <= record.ended_at_s <= end_s for record in run.counted)


def _with_tokens(of: Callable[[RequestRecord], float | None]) -> Callable[[BenchRun], Rows]:
    return lambda run: [(value, float(r.num_tokens_seen)) for r in _ok(run) if (value := of(r)) is not None]


def _median(values: NDArray[Any]) -> float:
    return float(np.median(values))


def _p99(values: NDArray[Any]) -> float:
    return float(np.quantile(values, 0.99))


def _mean(values: NDArray[Any]) -> float:
    return float(np.mean(values))


def _per_token(values: NDArray[Any]) -> float:
    amounts, tokens = values.reshape(-1, 2).sum(0)
    return float(amounts / tokens) if tokens else 0.0


def _per_million(values: NDArray[Any]) -> float:
    return 1e6 * _per_token(values)


def _cost(record: RequestRecord) -> float | None:
    return None if record.cost is None else float(record.cost)


_METRICS: Final = (
    _Metric("ttft_p50", "s", "lower", _values(lambda r: r.ttft_s), _median),
    _Metric("ttft_p99", "s", "lower", _values(lambda r: r.ttft_s), _p99, 100),
    _Metric("itl_p50", "s", "lower", lambda run: [r.itl_s for r in _ok(run)], _median),
    _Metric("itl_p99", "s", "lower", lambda run: [r.itl_s for r in _ok(run)], _p99, 100),
    _Metric("tpot_p50", "s", "lower", _values(lambda r: r.tpot_s), _median),
    _Metric("e2e_p50", "s", "lower", _values(lambda r: r.e2e_s), _median),
    _Metric(
        "output_tokens_per_s", "1/s", "higher", _slices(lambda run, *ends: tokens_in_window(run.counted, *ends)), _mean
    ),
    _Metric("requests_per_s", "1/s", "higher", _slices(_num_ended), _mean),
    _Metric("goodput_requests_per_s", "1/s", "higher", _slices(_num_good), _mean),
    _Metric("cost_per_million_output_tokens", "", "lower", _with_tokens(_cost), _per_million),
    _Metric("joules_per_output_token", "J", "lower", _with_tokens(lambda r: r.energy_joules), _per_token),
)


def compare_runs(a: BenchRun, b: BenchRun) -> Comparison:
    """Compare B with A; metrics that either lacks are left out."""
    metrics, skipped = [], set()
    if not (a.slo.limits_s and a.slo == b.slo):
        skipped.add("goodput_requests_per_s")
    if len(_currencies(a, b)) > 1:
        skipped.add("cost_per_million_output_tokens")
    for metric in _METRICS:
        if metric.name in skipped:
            continue
        rows_a, rows_b = ([row for row in metric.rows(run) if len(row)] for run in (a, b))
        if min(sum(map(len, rows)) for rows in (rows_a, rows_b)) < metric.num_values_needed:
            continue
        value_a, value_b = (metric.statistic(np.concatenate(rows)) for rows in (rows_a, rows_b))
        has_enough = min(len(rows_a), len(rows_b)) >= _MIN_ROWS
        ratio = bootstrap_ratio(rows_a, rows_b, metric.statistic) if has_enough else None
        metrics.append(ComparedMetric(metric.name, metric.unit, metric.better, value_a, value_b, ratio))
    names = sorted({*a.parameters, *b.parameters})
    pairs = {name: (a.parameters.get(name), b.parameters.get(name)) for name in names}
    return Comparison(
        tuple(metrics), {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}, tuple(_warnings(a, b))
    )


def _warnings(a: BenchRun, b: BenchRun) -> list[str]:
    warnings = [
        f"the runs' {key} differs: {a.environment.get(key)} and {b.environment.get(key)}."
        for key in _HOST_KEYS
        if a.environment.get(key) != b.environment.get(key)
    ]
    for name, run in (("A", a), ("B", b)):
        failed = sum(record.error_kind is not None for record in run.measured)
        if failed:
            warnings.append(f"{failed} of {len(run.measured)} requests of {name} failed.")
    cached = [cached_input_share(run.measured) or 0.0 for run in (a, b)]
    if abs(cached[0] - cached[1]) > _MAX_CACHED_DIFFERENCE:
        warnings.append(
            f"{cached[0]:.0%} of A's input came from the prefix cache and {cached[1]:.0%} of B's: "
            "they did not compute the same."
        )
    if a.slo != b.slo:
        warnings.append("the runs have different SLOs, so their goodput is not compared.")
    currencies = _currencies(a, b)
    if len(currencies) > 1:
        warnings.append(f"costs are in several currencies ({', '.join(currencies)}), so they are not compared.")
    return warnings


def _currencies(a: BenchRun, b: BenchRun) -> list[str]:
    return sorted({record.currency for run in (a, b) for record in run.measured if record.currency is not None})


def ratio_text(ratio: Ratio | None) -> str:
    """Return a ratio with its interval, for people."""
    return "too few values" if ratio is None else f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
