"""Splitting a whole into integer parts that add up to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def split_by_weight(total: int, weights: Sequence[int]) -> list[int]:
    """Split *total* in proportion to *weights* (at least one above 0), by the largest remainder; ties go to the first.

    The parts add up to *total* exactly, and each is within one of its exact share.

    >>> split_by_weight(10, [1, 1, 1]), split_by_weight(7, [0, 5])
    ([4, 3, 3], [0, 7])
    """
    sum_of_weights = sum(weights)
    assert sum_of_weights > 0, "a split needs a weight above 0"
    assert min(weights) >= 0, "weights are counts"
    parts = [total * weight // sum_of_weights for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda index: -(total * weights[index] % sum_of_weights))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts
