"""How many drafts each sequence gets in a step: as many as raise the step's expected tokens per second.

A step over T tokens takes about c0 + c1 T seconds (measured online by :class:`StepCostModel`; on CPUs it is close to
linear). Without drafts it yields one token per sequence. Draft i of a sequence whose proposer is accepted with
probability a adds a^i expected tokens (Leviathan et al. 2023, eq. 1) and c1 seconds. Taken in falling order of a^i,
drafts are worth adding while a^i / c1 exceeds the step's present rate: that maximises the rate, and it switches
speculation off, sequence by sequence, where the predicted gain is under 1, and on again when it returns.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEMORY: Final = 0.98  # weight an observation keeps after each later one: about fifty steps count
_PRIOR_MARGINAL_SHARE: Final = 0.25  # of a one-token step's time, for one more token, until it was measured
_MIN_GAIN: Final = 1.03  # a predicted gain below this is noise
_MAX_DRAFT_TOKENS: Final = 16


class StepCostModel:
    """Exponentially weighted least squares of step time (s) over the number of tokens in the step."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._sum_x = 0.0
        self._sum_y = 0.0
        self._sum_xx = 0.0
        self._sum_xy = 0.0

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Add one measured step."""
        self._weight = self._weight * _MEMORY + 1.0
        self._sum_x = self._sum_x * _MEMORY + num_tokens
        self._sum_y = self._sum_y * _MEMORY + duration_s
        self._sum_xx = self._sum_xx * _MEMORY + num_tokens * num_tokens
        self._sum_xy = self._sum_xy * _MEMORY + num_tokens * duration_s

    def coefficients(self) -> tuple[float, float] | None:
        """Return (c0, c1) in seconds and seconds per token, or None before the first observation.

        Where all observed steps were of one size the slope cannot be seen: a prior share of the step's time stands in.
        """
        if self._weight == 0.0:
            return None
        mean_x, mean_y = self._sum_x / self._weight, self._sum_y / self._weight
        variance = self._sum_xx / self._weight - mean_x * mean_x
        prior = _PRIOR_MARGINAL_SHARE * mean_y / (1.0 + _PRIOR_MARGINAL_SHARE * (mean_x - 1.0))
        covariance = self._sum_xy / self._weight - mean_x * mean_y
        # A ridge towards the prior: one token of standard deviation is enough to be believed.
        ridge = 0.05
        slope = (covariance + ridge * prior) / (variance + ridge)
        slope = min(max(slope, 0.02 * prior), mean_y / mean_x)
        return mean_y - slope * mean_x, slope


def choose_draft_lengths(
    acceptances: Sequence[float], max_lengths: Sequence[int], cost: tuple[float, float] | None, budget_tokens: int
) -> list[int]:
    """Return the number of drafts for each sequence.

    *acceptances* are probabilities per drafted token, *max_lengths* how many drafts each proposer has, *cost* is
    (c0, c1) of the step, *budget_tokens* how many drafts the step may hold in all.
    """
    lengths = [0] * len(acceptances)
    if cost is None or not acceptances:
        return lengths
    fixed_s, per_token_s = cost
    expected, duration_s = float(len(acceptances)), fixed_s + per_token_s * len(acceptances)
    base_rate = expected / duration_s
    heap = [
        (-acceptance, index)
        for index, (acceptance, longest) in enumerate(zip(acceptances, max_lengths, strict=True))
        if longest > 0
    ]
    heapq.heapify(heap)
    while heap and budget_tokens > 0:
        negative, index = heapq.heappop(heap)
        if -negative <= per_token_s * expected / duration_s:
            break
        lengths[index] += 1
        expected -= negative
        duration_s += per_token_s
        budget_tokens -= 1
        if lengths[index] < min(max_lengths[index], _MAX_DRAFT_TOKENS):
            heapq.heappush(heap, (negative * acceptances[index], index))
    if expected / duration_s < _MIN_GAIN * base_rate:
        return [0] * len(acceptances)
    return lengths
