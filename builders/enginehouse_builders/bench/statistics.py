"""Summaries of measured values, and how sure a ratio of two runs is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

NUM_RESAMPLES: Final = 1000
CONFIDENCE: Final = 0.95
PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """A sample in a few numbers, in the sample's unit.

    A percentile is None where the sample is too small to hold one value beyond it: p99 takes 100 values.
    """

    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class Ratio:
    """A statistic of B over that of A, with a bootstrap confidence interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_within_noise(self) -> bool:
        """Whether no difference (1) is inside the interval."""
        return self.low <= 1 <= self.high


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile, interpolated; None where fewer than ``1 / (1 - percent / 100)`` values are given.

    >>> percentile([1.0, 2.0, 3.0], 50), percentile([1.0, 2.0, 3.0], 99)
    (2.0, None)
    """
    needed = max(math.ceil(round(100 / (100 - percent), 9)), 1) if percent > 50 else 1  # noqa: PLR2004 - the median
    return float(np.percentile(values, percent)) if len(values) >= needed else None


def summarize(values: Sequence[float]) -> Summary:
    """Return the summary of a sample."""
    if not len(values):
        return Summary(0)
    array = np.asarray(values, float)
    percentiles: dict[str, Any] = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return Summary(
        len(array),
        mean=float(array.mean()),
        std=float(array.std(ddof=1)) if len(array) > 1 else None,
        min=float(array.min()),
        max=float(array.max()),
        **percentiles,
    )


def bootstrap_ratio(
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    statistic: Callable[[NDArray[Any]], float],
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Ratio | None:
    """Return ``statistic(b) / statistic(a)`` with a percentile interval from a moving-block bootstrap.

    Rows of *a* and *b* (a request's values, or a slice of time's) are in order of time; neighbours share the state of
    the server, so blocks of ``n ** (1/3)`` neighbouring rows are drawn, not single rows (Kuensch 1989). *statistic*
    takes all values of the drawn rows as one flat array. None where one side has no values or A's statistic is 0.
    """
    rows_a, rows_b = _as_arrays(a), _as_arrays(b)
    if not len(rows_a) or not len(rows_b):
        return None
    base = statistic(np.concatenate(rows_a))
    if base == 0:
        return None
    random = np.random.default_rng(seed)
    ratios = np.empty(num_resamples)
    for index in range(num_resamples):
        drawn_a = statistic(_resample(rows_a, random))
        ratios[index] = statistic(_resample(rows_b, random)) / drawn_a if drawn_a else np.nan
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(ratios, (tail, 1 - tail))
    return Ratio(statistic(np.concatenate(rows_b)) / base, float(low), float(high))


def _as_arrays(rows: Sequence[Sequence[float]]) -> Sequence[NDArray[Any]] | NDArray[Any]:
    """Return the rows that have values; where they are of one length as one array, which is faster to draw from."""
    arrays = [np.asarray(row, float) for row in rows if len(row)]
    return np.stack(arrays) if len({len(array) for array in arrays}) == 1 else arrays


def _resample(rows: Sequence[NDArray[Any]] | NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    size = len(rows)
    block = max(round(size ** (1 / 3)), 1)
    starts = random.integers(0, size, -(-size // block))
    indices = (starts[:, np.newaxis] + np.arange(block)) % size  # circular: every row is as likely as any other
    chosen = indices.ravel()[:size]
    return rows[chosen].ravel() if isinstance(rows, np.ndarray) else np.concatenate([rows[index] for index in chosen])
