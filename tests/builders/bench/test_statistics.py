"""Percentiles with their counts, and ratios with intervals that mean what they say."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest

from enginehouse_builders.bench.statistics import Summary, bootstrap_ratio, percentile, summarize


def slow_percentile(values: list[float], percent: float) -> float:
    """Interpolate between ranks by hand."""
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("seed", range(5))
def test_a_summary_is_what_the_definitions_say(seed: int) -> None:
    """Against sums and ranks by hand."""
    values = [float(value) for value in np.random.default_rng(seed).exponential(size=137)]
    summary = summarize(values)

    assert summary.count == 137
    assert (summary.mean, summary.std) == (pytest.approx(mean(values)), pytest.approx(stdev(values)))
    assert (summary.min, summary.max) == (min(values), max(values))
    for percent, found in ((50, summary.p50), (90, summary.p90), (95, summary.p95), (99, summary.p99)):
        assert found == pytest.approx(slow_percentile(values, percent))


@pytest.mark.parametrize(("percent", "needed"), [(50, 1), (90, 10), (95, 20), (99, 100)])
def test_a_percentile_takes_enough_values(percent: int, needed: int) -> None:
    """One value beyond it must be possible, else there is none."""
    assert percentile([1.0] * needed, percent) == 1.0
    assert percentile([1.0] * (needed - 1), percent) is None


def test_nothing_has_a_summary_too() -> None:
    """Its count is 0, the rest unknown."""
    assert summarize([]) == Summary(0)


def median(values: np.ndarray[Any, Any]) -> float:
    """Return the median."""
    return float(np.median(values))


def test_intervals_hold_the_true_ratio_about_as_often_as_they_say() -> None:
    """Of sixty pairs of samples, at least 52 of the 95 % intervals hold the ratio that made them."""
    random, hits = np.random.default_rng(5), 0
    for seed in range(60):
        a, b = random.lognormal(0, 0.5, 80), 1.5 * random.lognormal(0, 0.5, 80)
        found = bootstrap_ratio([(v,) for v in a], [(v,) for v in b], median, seed=seed, num_resamples=200)
        assert found is not None
        hits += found.low <= 1.5 <= found.high

    assert hits >= 52


def test_neighbours_that_move_together_widen_the_interval() -> None:
    """Blocks keep what consecutive requests share; the same values in random order look surer than they are."""
    random = np.random.default_rng(2)
    waves = np.repeat(random.lognormal(0, 0.5, 25), 8)
    shuffled = random.permutation(waves)

    def width(values: np.ndarray[Any, Any]) -> float:
        found = bootstrap_ratio([(v,) for v in values], [(v,) for v in values], lambda v: float(v.mean()))
        assert found is not None
        return found.high - found.low

    assert width(waves) > 1.3 * width(shuffled)


def test_the_same_sample_is_within_noise_and_a_double_is_not() -> None:
    """A ratio of 1 lies in its own interval; one of 2 is told from 1."""
    values = [(v,) for v in np.random.default_rng(1).normal(10, 1, 60)]
    same = bootstrap_ratio(values, values, median)
    double = bootstrap_ratio(values, [(2 * v,) for (v,) in values], median)

    assert same is not None
    assert double is not None
    assert (same.ratio, same.is_within_noise) == (1.0, True)
    assert (double.ratio, double.is_within_noise) == (pytest.approx(2.0), False)


@pytest.mark.parametrize(("a", "b"), [([], [(1.0,)]), ([(1.0,)], [()]), ([(0.0,)], [(1.0,)])])
def test_no_ratio_without_values_or_of_nothing(a: list[Any], b: list[Any]) -> None:
    """None, not a crash and not infinity."""
    assert bootstrap_ratio(a, b, median) is None
