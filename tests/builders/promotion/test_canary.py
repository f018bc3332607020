"""The canary's tests: against slow oracles, and by simulation how often they are wrong and how often they see."""

from __future__ import annotations

import bisect
import itertools
import math
import random

import pytest

from enginehouse_builders.promotion.canary import (
    CanaryPolicy,
    Interval,
    ReleaseCounts,
    fisher_p_value,
    histogram_median,
    look,
    rank_sum_p_value,
    sign_p_value,
)

BOUNDS = (10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, math.inf)
POLICY = CanaryPolicy()


def test_fisher_against_counting_every_table() -> None:
    """The tail of the hypergeometric distribution, computed in whole numbers."""
    for num, num_other in itertools.product((1, 3, 8), (2, 9)):
        for num_bad, num_other_bad in itertools.product(range(num + 1), range(num_other + 1)):
            bad, total = num_bad + num_other_bad, num + num_other
            tables = {k: math.comb(bad, k) * math.comb(total - bad, num - k) for k in range(num + 1)}
            expected = sum(count for k, count in tables.items() if k >= num_bad) / math.comb(total, num)
            assert fisher_p_value(num_bad, num, num_other_bad, num_other) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_rank_sum_against_shuffling(seed: int) -> None:
    """Close to the share of random relabellings that rank as high."""
    rng = random.Random(seed)
    values = [rng.choice(BOUNDS[1:5]) for _ in range(25)]
    others = [rng.choice(BOUNDS[:5]) for _ in range(40)]

    def score(values: list[float], others: list[float]) -> float:
        ordered = sorted(others)
        return sum((bisect.bisect_left(ordered, v) + bisect.bisect_right(ordered, v)) / 2 for v in values)

    reached, pool = score(values, others), values + others
    hits = 0
    for _ in range(2000):
        rng.shuffle(pool)
        hits += score(pool[:25], pool[25:]) >= reached
    assert rank_sum_p_value(binned(values), binned(others)) == pytest.approx(hits / 2000, abs=0.04)


def test_nothing_to_compare_is_no_evidence() -> None:
    """Empty samples, or all values alike: p is 1."""
    assert rank_sum_p_value({}, {10.0: 3}) == 1.0
    assert rank_sum_p_value({10.0: 3}, {10.0: 5}) == 1.0
    assert sign_p_value(0, 0) == 1.0
    assert sign_p_value(3, 3) == 0.125
    assert look(POLICY, 0.5, ReleaseCounts(), ReleaseCounts(), []) == []


def test_median_of_a_histogram() -> None:
    """Within the bucket that holds the middle."""
    assert histogram_median({10.0: 0, 20.0: 4}) == 15.0
    assert histogram_median({10.0: 1, 20.0: 1, math.inf: 2}) == 20.0
    assert math.isnan(histogram_median({}))


def binned(values: list[float]) -> dict[float, int]:
    """Count values by bucket."""
    counts = dict.fromkeys(BOUNDS, 0)
    for value in values:
        counts[BOUNDS[bisect.bisect_left(BOUNDS, value)]] += 1
    return counts


def simulate(rng: random.Random, *, errors: float = 0.01, slower: float = 1.0, dearer: float = 1.0) -> bool:
    """Run one canary with these faults at half the requests through every look; return whether it was called worse."""

    def counts(num: int, error_rate: float, factor: float, cost: float) -> ReleaseCounts:
        first = [factor * rng.lognormvariate(4.0, 0.6) for _ in range(num)]
        between = [factor * rng.lognormvariate(3.0, 0.3) for _ in range(num)]
        amount = sum(cost * rng.lognormvariate(0.0, 0.5) for _ in range(num))
        num_errors = sum(rng.random() < error_rate for _ in range(num))
        return ReleaseCounts(num, num_errors, binned(first), binned(between), amount, amount / 10, 10 * num)

    intervals: list[Interval] = []
    for num in POLICY.looks:
        while len(intervals) * 10 < num:
            intervals.append(Interval(counts(10, 0.01, 1.0, 1.0), counts(10, errors, slower, dearer)))
        stable, canary = (total([getattr(i, side) for i in intervals]) for side in ("stable", "canary"))
        if look(POLICY, 0.5, stable, canary, intervals):
            return True
    return False


def total(parts: list[ReleaseCounts]) -> ReleaseCounts:
    """Add up."""
    return ReleaseCounts(
        sum(part.num_requests for part in parts),
        sum(part.num_errors for part in parts),
        {bound: sum(part.first_token_ms[bound] for part in parts) for bound in BOUNDS},
        {bound: sum(part.inter_token_ms[bound] for part in parts) for bound in BOUNDS},
    )


def test_a_canary_that_is_no_worse_is_seldom_called_worse() -> None:
    """False alarms stay below the stated chance."""
    rng = random.Random(1)
    assert sum(simulate(rng) for _ in range(400)) / 400 <= POLICY.alpha


@pytest.mark.parametrize("fault", [{"errors": 0.15}, {"slower": 1.8}, {"dearer": 1.6}])
def test_a_canary_that_is_much_worse_is_called_worse(fault: dict[str, float]) -> None:
    """Errors on every seventh request, 80% slower, or 60% dearer: nine of ten are seen within the three looks."""
    rng = random.Random(2)
    assert sum(simulate(rng, **fault) for _ in range(60)) / 60 >= 0.9


def test_a_difference_that_does_not_matter_is_not_called_one() -> None:
    """However many requests make it sure."""
    many = 10**6
    stable = ReleaseCounts(many, 0, {10.0: many // 2, 25.0: many // 2})
    canary = ReleaseCounts(many, many // 200, {10.0: many // 2 - 20_000, 25.0: many // 2 + 20_000})

    assert fisher_p_value(canary.num_errors, many, 0, many) < 1e-6
    assert rank_sum_p_value(canary.first_token_ms, stable.first_token_ms) < 1e-6
    assert look(POLICY, 0.5, stable, canary, []) == []


def test_machine_time_is_compared_at_like_shares_only() -> None:
    """At a tenth of the requests the canary's batches are small and dear, and that is not its fault."""
    dear = [
        Interval(ReleaseCounts(5, machine_s=1.0, num_output_tokens=50), ReleaseCounts(5, 0, {}, {}, 0.0, 9.0, 50))
    ] * 20
    (regression,) = look(POLICY, 0.5, ReleaseCounts(100), ReleaseCounts(100), dear)

    assert str(regression).startswith("machine time per token 0.18 s against 0.02 s")
    assert look(POLICY, 0.1, ReleaseCounts(100), ReleaseCounts(100), dear) == []
