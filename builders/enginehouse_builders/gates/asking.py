"""Asking an engine many things at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from enginehouse_builders.gates.divergence import ScoredSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from enginehouse_builders.gates.services import EngineService
    from enginehouse_builders.gates.tokenizers import EncodedPrompt

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

NUM_ANSWER_TOKENS: Final = 24
_CONCURRENCY: Final = 6  # requests at a time: enough to fill a batch, few enough that their logits stay small


def answered(service: EngineService, prompt: EncodedPrompt) -> ScoredSequence:
    """Return a prompt with the service's own greedy answer."""
    answer = [token for new in service.stream(prompt.token_ids, NUM_ANSWER_TOKENS) for token in new]
    return ScoredSequence((*prompt.token_ids, *answer), len(prompt.token_ids), prompt.is_text)


def in_parallel(function: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
    """Return the results in the order of *items*; the first error is raised."""
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        return list(pool.map(function, items))
