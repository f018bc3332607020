"""Changing logits before a token is chosen: embedding bias, penalties, minimum length and bad words.

Most requests change few logits, and most changes lower them. Then the K largest logits of the step suffice: what lies
outside was no larger than the K-th and only went down. Otherwise the whole row is read.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import GenerationRequest
    from enginehouse_backends.engine.words import BadWords

    Values = NDArray[np.float64]
    Ids = NDArray[np.int64]


class LogitsProcessor:
    """The changes of one sequence, as far as it has come."""

    def __init__(self, request: GenerationRequest, bad_words: BadWords) -> None:
        sampling = request.sampling
        self._end_id = request.end_id
        self._min_new_tokens = request.min_new_tokens
        self._bad_words = bad_words
        self._bias = sampling.embedding_bias
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._has_penalty = self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0
        self._counts: Counter[int] = Counter(request.prompt_token_ids if self._has_penalty else ())
        self._num_output_tokens = 0
        self._is_static_identity = not (self._has_penalty or self._bias is not None or bad_words)
        self.may_raise = (
            self._repetition < 1.0
            or self._presence < 0.0
            or self._frequency < 0.0
            or (self._bias is not None and bool((self._bias > 0.0).any()))
        )

    @property
    def may_end(self) -> bool:
        """Whether the end id, if there is one, may come now."""
        return self._end_id is None or self._num_output_tokens >= self._min_new_tokens

    @property
    def is_identity(self) -> bool:
        """Whether nothing is changed now."""
        return self._is_static_identity and self.may_end

    def accept(self, token_id: int) -> None:
        """Move on past a token that was taken."""
        self._num_output_tokens += 1
        if self._has_penalty:
            self._counts[token_id] += 1
        if self._bad_words:
            self._bad_words.push(token_id)

    def apply(self, token_ids: Ids, values: Values) -> None:
        """Change *values*, the logits of *token_ids*, in place; order: bias, penalties, bans."""
        if self._bias is not None:
            values += self._bias[token_ids]
        if self._has_penalty:
            counts = np.array([self._counts.get(token_id, 0) for token_id in token_ids.tolist()])
            self._penalize(values, counts)
        banned = self._bad_words.banned_ids()
        if len(banned):
            nearest = banned[np.minimum(np.searchsorted(banned, token_ids), len(banned) - 1)]
            values[nearest == token_ids] = -np.inf
        if not self.may_end:
            values[token_ids == self._end_id] = -np.inf

    def apply_to_row(self, row: Values) -> None:
        """Change a whole row in place, touching only what changes."""
        if self._bias is not None:
            row += self._bias
        if self._has_penalty:
            seen = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.int64, len(self._counts))
            values = row[seen]
            self._penalize(values, counts)
            row[seen] = values
        row[self._bad_words.banned_ids()] = -np.inf
        if not self.may_end:
            row[self._end_id] = -np.inf

    def _penalize(self, values: Values, counts: NDArray[np.int64]) -> None:
        """Repetition: divide positive, multiply negative logits (Keskar et al. 2019); then presence and frequency."""
        seen = np.flatnonzero(counts)
        if not len(seen):
            return
        changed = values[seen]
        if self._repetition != 1.0:
            changed = np.where(changed > 0, changed / self._repetition, changed * self._repetition)
        values[seen] = changed - (self._presence + self._frequency * counts[seen])
