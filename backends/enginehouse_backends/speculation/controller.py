"""How many drafts each sequence gets in a step: as many as make the step's expected tokens per second highest.

A step over T tokens takes t(T) seconds, measured online (:class:`StepCostModel`). Without drafts it yields one token
per sequence. Draft i of a sequence whose proposer is accepted with probability a adds a^i expected tokens (Leviathan et
al. 2023, eq. 1). Taken in falling order of a^i, the best number of drafts is the one with the highest rate; where that
gains nothing over no drafts, there are none: speculation is switched off, and on again when the predicted gain returns.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MEMORY: Final = 0.8  # weight that a size's earlier steps keep when a new one is measured: about five count
_PRIOR_MARGINAL_SHARE: Final = 0.25  # of a one-token step's time, for one more token, until it was measured
_MIN_GAIN: Final = 1.05  # a predicted gain below this is noise
_FINE_SIZES: Final = 16  # up to here every step size is measured by itself, above in groups of eight
_GROUP: Final = 8
_MAX_AGE: Final = 60  # steps after which a size that was not measured again is forgotten, and may be tried anew
MAX_DRAFT_TOKENS: Final = 16


class StepCostModel:
    """Measured step times by the number of tokens in the step; between sizes interpolated, beyond them extrapolated."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # sorted
        self._durations_s: dict[int, float] = {}
        self._seen: dict[int, int] = {}  # size -> the observation that measured it last
        self._num_observations = 0

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Add one measured step."""
        size = _size_of(num_tokens)
        known_s = self._durations_s.get(size)
        if known_s is None:
            self._sizes.insert(bisect_left(self._sizes, size), size)
            self._durations_s[size] = duration_s
        else:
            self._durations_s[size] = _MEMORY * known_s + (1 - _MEMORY) * duration_s
        self._num_observations += 1
        self._seen[size] = self._num_observations
        for old in [each for each in self._sizes if self._num_observations - self._seen[each] > _MAX_AGE]:
            self._sizes.remove(old)
            del self._durations_s[old], self._seen[old]

    def predict(self, num_tokens: int) -> float | None:
        """Return the seconds a step of so many tokens would take, or None before the first observation."""
        if not self._sizes:
            return None
        size = _size_of(num_tokens)
        index = bisect_left(self._sizes, size)
        if index < len(self._sizes) and self._sizes[index] == size:
            return self._durations_s[size]
        if index == len(self._sizes):
            last = self._sizes[-1]
            return self._durations_s[last] + (size - last) * self._slope_at_the_end()
        upper = self._sizes[index]
        if index == 0:
            return self._durations_s[upper]
        lower = self._sizes[index - 1]
        share = (size - lower) / (upper - lower)
        return (1 - share) * self._durations_s[lower] + share * self._durations_s[upper]

    def _slope_at_the_end(self) -> float:
        """Seconds per token beyond the largest known size: as between the two largest, at least the prior share."""
        last = self._sizes[-1]
        prior = _PRIOR_MARGINAL_SHARE * self._durations_s[last] / (1.0 + _PRIOR_MARGINAL_SHARE * (last - 1))
        if len(self._sizes) == 1:
            return prior
        before = self._sizes[-2]
        return max(prior, (self._durations_s[last] - self._durations_s[before]) / (last - before))


def _size_of(num_tokens: int) -> int:
    return num_tokens if num_tokens <= _FINE_SIZES else -(-num_tokens // _GROUP) * _GROUP


def choose_draft_lengths(
    acceptances: Sequence[float],
    max_lengths: Sequence[int],
    predict_s: Callable[[int], float | None],
    budget_tokens: int,
) -> list[int]:
    """Return the number of drafts for each sequence.

    *acceptances* are probabilities per drafted token, *max_lengths* how many drafts each proposer has, *predict_s* the
    seconds of a step by its tokens, *budget_tokens* how many drafts the step may hold in all.
    """
    num_sequences = len(acceptances)
    base_s = predict_s(num_sequences) if num_sequences else None
    if base_s is None:
        return [0] * num_sequences
    heap = [(-a, index) for index, (a, n) in enumerate(zip(acceptances, max_lengths, strict=True)) if n > 0]
    heapq.heapify(heap)
    taken: list[int] = []  # the sequence of each draft, likeliest first
    lengths = [0] * num_sequences
    expected = float(num_sequences)
    best_rate, best_count = _MIN_GAIN * expected / base_s, 0
    while heap and len(taken) < budget_tokens:
        negative, index = heapq.heappop(heap)
        expected -= negative
        taken.append(index)
        lengths[index] += 1
        duration_s = predict_s(num_sequences + len(taken))
        if duration_s is not None and expected / duration_s > best_rate:
            best_rate, best_count = expected / duration_s, len(taken)
        if lengths[index] < min(max_lengths[index], MAX_DRAFT_TOKENS):
            heapq.heappush(heap, (negative * acceptances[index], index))
    for index in taken[best_count:]:
        lengths[index] -= 1
    return lengths
