"""Medusa's heads and the tree of drafts that they propose."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from enginehouse_builders.targets.source import read_json
from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_RANK: Final = 10  # guesses of one head, best first, that a tree may use


def read_medusa_heads(folder: Path) -> tuple[int, int]:
    """Return the number of heads in *folder* and the layers of each.

    Raises :class:`ModelSourceError` when its ``config.json`` does not say.
    """
    config = read_json(folder / "config.json")
    heads, layers = config.get("medusa_num_heads"), config.get("medusa_num_layers")
    if not (isinstance(heads, int) and isinstance(layers, int) and heads > 0 and layers > 0):
        msg = f"{folder / 'config.json'} has no medusa_num_heads and medusa_num_layers; give a folder of Medusa heads."
        raise ModelSourceError(msg)
    return heads, layers


def medusa_choices(num_heads: int, num_draft_tokens: int) -> list[tuple[int, ...]]:
    """Return the drafts of one step as paths of ranks from the root: ``(0, 2)`` is the second head's third guess.

    The cheapest *num_draft_tokens* paths, where a step down costs one and each rank below a head's best one more; a
    path's parent is cheaper than itself, so the tree is connected. Shorter paths come first.

    >>> medusa_choices(2, 4)
    [(0,), (1,), (2,), (0, 0)]
    """
    paths: list[tuple[int, ...]] = []
    for cost in itertools.count(1):
        found = [path for depth in range(1, num_heads + 1) for path in _paths(depth, cost - depth)]
        paths += found[: num_draft_tokens - len(paths)]
        if len(paths) == num_draft_tokens or cost > num_heads * _MAX_RANK:
            return sorted(paths, key=lambda path: (len(path), path))
    raise AssertionError


def _paths(depth: int, excess: int) -> list[tuple[int, ...]]:
    """Paths of *depth* ranks that add up to *excess*."""
    if excess < 0 or depth == 0:
        return [()] if excess == 0 and depth == 0 else []
    return [
        (rank, *rest) for rank in range(min(excess, _MAX_RANK - 1) + 1) for rest in _paths(depth - 1, excess - rank)
    ]
