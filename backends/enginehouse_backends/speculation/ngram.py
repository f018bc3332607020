"""Prompt lookup: draft what followed the last time these tokens were seen (Saxena 2023, "Prompt Lookup Decoding").

Costs nothing but a dictionary per sequence, and pays where the output copies: summaries that quote, code edits, JSON
extraction. Its acceptance is measured on every token, also while no draft is being verified: whether the token it
would have drafted first is the one that came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_MIN_NGRAM: Final = 2
_MAX_NGRAM: Final = 4
_MEMORY: Final = 0.9  # weight that each earlier trial keeps when a new one arrives: about ten trials count
_PRIOR_ACCEPTANCE: Final = 0.5
_PRIOR_WEIGHT: Final = 1.0


class NgramProposer:
    """Drafts for one sequence. Linear in its length: each token is indexed once."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._token_ids: list[int] = []
        self._next_position: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._match: int | None = None  # position of the token that would be drafted first
        self._weighted_hits = 0.0
        self._weighted_trials = 0.0
        for token_id in token_ids:
            self._append(token_id)

    @property
    def acceptance(self) -> float:
        """Estimated probability that the next drafted token is accepted, from recent trials and a prior."""
        hits = self._weighted_hits + _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
        return hits / (self._weighted_trials + _PRIOR_WEIGHT)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append generated tokens, measuring for each whether it would have been drafted."""
        for token_id in token_ids:
            if self._match is not None:
                is_hit = self._token_ids[self._match] == token_id
                self._weighted_hits = self._weighted_hits * _MEMORY + is_hit
                self._weighted_trials = self._weighted_trials * _MEMORY + 1.0
            self._append(token_id)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to *max_tokens* drafts; empty when nothing like the last tokens was seen before."""
        if self._match is None or max_tokens <= 0:
            return ()
        return tuple(self._token_ids[self._match : self._match + max_tokens])

    def _append(self, token_id: int) -> None:
        continues = self._match is not None and self._token_ids[self._match] == token_id
        self._token_ids.append(token_id)
        end = len(self._token_ids)
        found: int | None = None
        for size in range(min(_MAX_NGRAM, end), _MIN_NGRAM - 1, -1):
            ngram = tuple(self._token_ids[end - size :])
            if found is None:
                found = self._next_position.get(ngram)
            self._next_position[ngram] = end
        # A match that goes on is longer than any n-gram just found, so it is kept.
        self._match = self._match + 1 if continues and self._match is not None else found
