"""Is a canary worse than the release it is to replace? A stated test, with a bounded chance of a false alarm.

The canary is looked at a fixed number of times: when it has ended ``min_requests``, twice and four times as many
requests. At each look five things are compared with the stable release over the same time:

========  ==========================================================  =======================================
what      test (one-sided)                                            and it must matter
========  ==========================================================  =======================================
errors    Fisher's exact test                                         error rate higher by ``max_error_increase``
TTFT      Wilcoxon's rank-sum test on the histograms, ties corrected  median longer by ``max_latency_ratio``
ITL       the same                                                    the same
billed    exact sign test over intervals of time                      price per request by ``max_cost_ratio``
machine   the same                                                    machine time per token by the same
========  ==========================================================  =======================================

Each test at each look has the level ``alpha`` divided by the number of tests and looks (Bonferroni), so the chance that
a canary that is no worse is ever called worse is at most ``alpha``, however the five depend on each other. That holds
for requests that do not depend on each other; bursts make it rougher. A regression smaller than what must matter is not
called one, however sure.

Machine time per token is compared only where both releases answer like shares: at unlike shares they run batches of
unlike size, and a small batch costs more per token for no fault of the release's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Verdict = Literal["waiting", "passed", "regressed"]

_NUM_TESTS: Final = 5
_LIKE_SHARES: Final = (0.4, 0.6)


@dataclass(frozen=True, slots=True)
class CanaryPolicy:
    """When a canary is looked at, and what counts as worse."""

    min_requests: int = 50  # ended by the canary, before the first look
    num_looks: int = 3
    alpha: float = 0.05  # chance of a false alarm over the whole canary
    max_error_increase: float = 0.01
    max_latency_ratio: float = 1.25
    max_cost_ratio: float = 1.15

    @property
    def looks(self) -> tuple[int, ...]:
        """Requests of the canary at which it is looked at."""
        return tuple(self.min_requests << look for look in range(self.num_looks))

    @property
    def level(self) -> float:
        """Level of one test at one look."""
        return self.alpha / (_NUM_TESTS * self.num_looks)


@dataclass(frozen=True, slots=True)
class ReleaseCounts:
    """What one release did since the canary began. Histograms: upper bound -> observations in that bucket alone."""

    num_requests: int = 0
    num_errors: int = 0
    first_token_ms: Mapping[float, int] = field(default_factory=dict)
    inter_token_ms: Mapping[float, int] = field(default_factory=dict)
    amount: float = 0.0
    machine_s: float = 0.0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Regression:
    """One way in which the canary is worse."""

    what: str
    p_value: float
    stable: float
    canary: float
    unit: str

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.what} {self.canary:.3g}{self.unit} against {self.stable:.3g}{self.unit} (p = {self.p_value:.1g})"


@dataclass(frozen=True, slots=True)
class Interval:
    """What both releases did in one span of time, for the costs, which come as sums only."""

    stable: ReleaseCounts
    canary: ReleaseCounts


def look(
    policy: CanaryPolicy, share: float, stable: ReleaseCounts, canary: ReleaseCounts, intervals: Sequence[Interval]
) -> list[Regression]:
    """Return every way in which the canary is worse, by the tests of the module; empty when there is none."""
    found = [
        _errors(policy, stable, canary),
        _latency(policy, "time to first token", stable.first_token_ms, canary.first_token_ms),
        _latency(policy, "time between tokens", stable.inter_token_ms, canary.inter_token_ms),
        _cost(policy, "price per request", _prices(intervals)),
    ]
    if _LIKE_SHARES[0] <= share <= _LIKE_SHARES[1]:
        found.append(_cost(policy, "machine time per token", _machine_times(intervals), " s"))
    return [regression for regression in found if regression is not None]


def fisher_p_value(num_bad: int, num: int, num_other_bad: int, num_other: int) -> float:
    """Return the chance of at least *num_bad* of *num* when both groups fail alike (hypergeometric upper tail)."""
    total, bad = num + num_other, num_bad + num_other_bad
    log_all = _log_choose(total, num)
    terms = (
        math.exp(_log_choose(bad, k) + _log_choose(total - bad, num - k) - log_all)
        for k in range(num_bad, min(bad, num) + 1)
        if num - k <= total - bad
    )
    return min(1.0, math.fsum(terms))


def rank_sum_p_value(values: Mapping[float, int], others: Mapping[float, int]) -> float:
    """Return the chance that *values* rank as high as they do when both are alike (normal approximation with ties)."""
    num, num_other = sum(values.values()), sum(others.values())
    total = num + num_other
    if not num or not num_other:
        return 1.0
    above, below = 0.0, 0
    ties = 0.0
    for bound in sorted({*values, *others}):
        here, other = values.get(bound, 0), others.get(bound, 0)
        above += here * (below + 0.5 * other)
        below += other
        ties += float(here + other) ** 3 - (here + other)
    variance = num * num_other / 12 * (total + 1 - ties / (total * (total - 1))) if total > 1 else 0.0
    if variance <= 0:
        return 1.0
    z = (above - num * num_other / 2 - 0.5) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


def sign_p_value(num_worse: int, num: int) -> float:
    """Return the chance of at least *num_worse* heads in *num* throws of a coin."""
    return math.fsum(math.comb(num, k) for k in range(num_worse, num + 1)) / 2**num if num else 1.0


def histogram_median(values: Mapping[float, int]) -> float:
    """Return the median of a histogram, evenly spread within its bucket; NaN of an empty one."""
    half, below, low = sum(values.values()) / 2, 0, 0.0
    for bound in sorted(values):
        if values[bound] and below + values[bound] >= half:
            top = bound if math.isfinite(bound) else 2 * low
            return low + (top - low) * (half - below) / values[bound]
        below += values[bound]
        low = bound
    return math.nan


def _errors(policy: CanaryPolicy, stable: ReleaseCounts, canary: ReleaseCounts) -> Regression | None:
    if not stable.num_requests or not canary.num_requests:
        return None
    rates = stable.num_errors / stable.num_requests, canary.num_errors / canary.num_requests
    p_value = fisher_p_value(canary.num_errors, canary.num_requests, stable.num_errors, stable.num_requests)
    if p_value >= policy.level or rates[1] - rates[0] <= policy.max_error_increase:
        return None
    return Regression("error rate", p_value, *rates, unit="")


def _latency(
    policy: CanaryPolicy, what: str, stable: Mapping[float, int], canary: Mapping[float, int]
) -> Regression | None:
    p_value = rank_sum_p_value(canary, stable)
    medians = histogram_median(stable), histogram_median(canary)
    if p_value >= policy.level or not medians[1] > policy.max_latency_ratio * medians[0]:
        return None
    return Regression(what, p_value, *medians, unit=" ms")


def _cost(policy: CanaryPolicy, what: str, pairs: Sequence[tuple[float, float]], unit: str = "") -> Regression | None:
    """Pairs are (stable, canary) costs of one interval each."""
    num_worse = sum(canary > policy.max_cost_ratio * stable for stable, canary in pairs)
    p_value = sign_p_value(num_worse, len(pairs))
    if p_value >= policy.level:
        return None
    middle = sorted(pairs, key=lambda pair: pair[1] / pair[0])[len(pairs) // 2]
    return Regression(what, p_value, *middle, unit=unit)


def _prices(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    return [
        (each.stable.amount / each.stable.num_requests, each.canary.amount / each.canary.num_requests)
        for each in intervals
        if each.stable.amount > 0 and each.canary.num_requests > 0 and each.stable.num_requests > 0
    ]


def _machine_times(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    return [
        (each.stable.machine_s / each.stable.num_output_tokens, each.canary.machine_s / each.canary.num_output_tokens)
        for each in intervals
        if each.stable.machine_s > 0 and each.canary.num_output_tokens > 0 and each.stable.num_output_tokens > 0
    ]


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
