"""From a row of logits to a token, for one sequence.

Randomness is one uniform number per output position, a hash of (seed, sequence index, position), and tokens are drawn
by inverting the cumulative distribution over descending probabilities, ties by id. So a token depends on the seed, the
position and the row alone: the same text alone or in any batch, with or without drafts, and whether the K largest
logits sufficed or the whole row was read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from enginehouse_backends.engine.logits_processor import LogitsProcessor
from enginehouse_backends.engine.words import BadWords, WordMatching
from enginehouse_contract.errors import EngineFailureError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import GenerationRequest
    from enginehouse_backends.engine.step import StepLogits
    from enginehouse_backends.tokenization.vocabulary import Vocabulary

_SORTED_AT_ONCE: Final = 4096  # candidates sorted before falling back to sorting the whole row


class SampledToken(NamedTuple):
    """A token and its log probability under the model's own distribution, before any processing."""

    token_id: int
    log_prob: float


class _Distribution(NamedTuple):
    """Candidates by falling probability; ``mass`` is what they and all tokens left out have together."""

    token_ids: NDArray[np.int64]
    weights: NDArray[np.float64]  # not normalized
    mass: float


class SequenceSampler:
    """Samples one sequence; :meth:`accept` moves it past a token that was taken."""

    def __init__(
        self,
        request: GenerationRequest,
        sequence_index: int,
        vocabulary: Vocabulary,
        seed: int,
        *,
        word_matching: WordMatching = "text",
    ) -> None:
        self._sampling = request.sampling
        self._end_id = request.end_id
        self._vocab_size = vocabulary.size
        self._stream = f"{seed}/{sequence_index}/".encode()
        self._position = 0
        self._top_p = request.sampling.top_p
        bad_words = BadWords(vocabulary, request.bad_words, request.prompt_token_ids, matching=word_matching)
        self._processor = LogitsProcessor(request, bad_words)
        self._is_plain_greedy = self._sampling.is_greedy and self._processor.is_identity

    def accept(self, token_id: int) -> None:
        """Count a token as taken: penalties, bad words, the decay of top_p, and the position."""
        self._position += 1
        if self._is_plain_greedy:
            return
        self._processor.accept(token_id)
        sampling = self._sampling
        if token_id == sampling.top_p_reset_id:
            self._top_p = sampling.top_p
        elif sampling.top_p_decay != 1.0:
            self._top_p = max(self._top_p * sampling.top_p_decay, sampling.top_p_min)

    def sample(self, logits: StepLogits, row: int) -> SampledToken:
        """Choose the token of the present position from one row; changes nothing.

        Raises :class:`EngineFailureError` when every token is banned and no end id is left to end with.
        """
        if self._is_plain_greedy:
            return SampledToken(int(logits.top_ids[row, 0]), float(logits.top_values[row, 0] - logits.log_sum_exp[row]))
        if self._sampling.is_greedy:
            token_id = self._most_likely(logits, row)
        else:
            distribution = self._nucleus(logits, row)
            token_id = _draw(distribution.token_ids, distribution.weights, self._uniform("draw"))
        return SampledToken(token_id, _log_prob(logits, row, token_id))

    def verify(
        self, logits: StepLogits, row: int, draft_id: int, draft_logits: NDArray[np.float32], threshold: float | None
    ) -> SampledToken:
        """Accept a draft drawn from another distribution, or draw what keeps the target's own distribution.

        Leviathan et al. 2023, algorithm 1: with target p and draft q accept with probability min(1, p/q), else draw
        from max(0, p - q). A *threshold* takes the place of the random number, as in TensorRT-LLM. Greedy: exact match.
        """
        if self._sampling.is_greedy:
            return self.sample(logits, row)
        target = self._nucleus(logits, row)
        p = target.weights / target.weights.sum()
        scaled = draft_logits.astype(np.float64) / self._sampling.temperature
        scaled = np.exp(scaled - scaled.max())
        q = scaled / scaled.sum()
        p_draft = float(p[target.token_ids == draft_id].sum())
        bar = self._uniform("accept") if threshold is None else threshold
        if p_draft >= bar * float(q[draft_id]) and p_draft > 0.0:
            return SampledToken(draft_id, _log_prob(logits, row, draft_id))
        residual = np.maximum(p - q[target.token_ids], 0.0)
        if not residual.any():
            residual = p
        token_id = _draw(target.token_ids, residual, self._uniform("draw"))
        return SampledToken(token_id, _log_prob(logits, row, token_id))

    def _uniform(self, purpose: str) -> float:
        digest = hashlib.blake2b(self._stream + f"{self._position}/{purpose}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    def _most_likely(self, logits: StepLogits, row: int) -> int:
        candidates = self._lowered_candidates(logits, row, num_needed=1)
        if candidates is not None:
            return int(candidates[0][0])
        values = self._processed_row(logits, row)
        token_id = int(values.argmax())
        return token_id if np.isfinite(values[token_id]) else self._end_of_the_road()

    def _nucleus(self, logits: StepLogits, row: int) -> _Distribution:
        """The candidates left after temperature, top-k and top-p."""
        distribution = self._candidates(logits, row)
        if self._top_p >= 1.0:
            return distribution
        cumulative = np.cumsum(distribution.weights)
        count = int(np.searchsorted(cumulative, self._top_p * distribution.mass * (1 - 1e-12))) + 1
        weights = distribution.weights[:count]
        return _Distribution(distribution.token_ids[:count], weights, float(weights.sum()))

    def _candidates(self, logits: StepLogits, row: int) -> _Distribution:
        """Tokens by falling probability, enough of them for top-k or top-p."""
        top_k, temperature = self._sampling.top_k, self._sampling.temperature
        if top_k:
            found = self._lowered_candidates(logits, row, num_needed=top_k)
            if found is not None:
                return _distribution(found[0][:top_k], found[1][:top_k], temperature)
        elif self._processor.is_identity and temperature == 1.0 and self._top_p < 1.0:
            ids = logits.top_ids[row].astype(np.int64)
            weights = np.exp(logits.top_values[row].astype(np.float64) - logits.log_sum_exp[row])
            if weights.sum() >= self._top_p:
                order = np.lexsort((ids, -weights))
                return _Distribution(ids[order], weights[order], 1.0)
        values = self._processed_row(logits, row)
        if not np.isfinite(values.max()):
            end_id = self._end_of_the_road()
            return _Distribution(np.array([end_id]), np.ones(1), 1.0)
        if top_k:
            ids = _largest(values, top_k)
            return _distribution(ids, values[ids], temperature)
        weights = np.exp((values - values.max()) / temperature)
        mass = float(weights.sum())
        ids = _largest(values, _SORTED_AT_ONCE)
        if weights[ids].sum() < self._top_p * mass or self._top_p >= 1.0:
            ids = _largest(values, len(values))
        return _Distribution(ids, weights[ids], mass)

    def _lowered_candidates(
        self, logits: StepLogits, row: int, num_needed: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Processed candidates from the step's K largest, or None where these do not prove the largest *num_needed*.

        Every token outside is at most the K-th value, and changes only lower it: candidates above that are certain.
        """
        num_columns = logits.top_ids.shape[1]
        if self._processor.may_raise or num_needed > num_columns:
            return None
        ids = logits.top_ids[row].astype(np.int64)
        values = logits.top_values[row].astype(np.float64)
        floor = values[-1]
        if not self._processor.is_identity:
            self._processor.apply(ids, values)
        order = np.lexsort((ids, -values))
        ids, values = ids[order], values[order]
        num_certain = int(np.count_nonzero(values > floor))
        if num_needed > num_certain and num_columns < self._vocab_size:
            return None
        return (ids, values) if np.isfinite(values[0]) else None

    def _processed_row(self, logits: StepLogits, row: int) -> NDArray[np.float64]:
        values = logits.full_row(row).astype(np.float64)
        self._processor.apply_to_row(values)
        return values

    def _end_of_the_road(self) -> int:
        if self._end_id is not None:
            return self._end_id
        msg = "every token is banned (bad words, embedding bias or minimum length) and the request has no end id."
        raise EngineFailureError(msg)


def _distribution(ids: NDArray[np.int64], values: NDArray[np.float64], temperature: float) -> _Distribution:
    weights = np.exp((values - values[0]) / temperature)
    return _Distribution(ids, weights, float(weights.sum()))


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Ids of the *count* largest values, falling, ties by id."""
    if count >= len(values):
        return np.lexsort((np.arange(len(values)), -values))
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= threshold)
    return ids[np.lexsort((ids, -values[ids]))][:count]


def _draw(ids: NDArray[np.int64], weights: NDArray[np.float64], uniform: float) -> int:
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def _log_prob(logits: StepLogits, row: int, token_id: int) -> float:
    column = np.flatnonzero(logits.top_ids[row] == token_id)
    value = logits.top_values[row, column[0]] if len(column) else logits.full_row(row)[token_id]
    return float(value - logits.log_sum_exp[row])
