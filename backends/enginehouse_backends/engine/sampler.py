"""From a row of logits to a token, for one sequence.

Randomness is one uniform number per output position, a hash of (seed, sequence index, position), and tokens are drawn
by inverting the cumulative distribution over descending probabilities, ties by id. So a token depends on the seed, the
position and the row alone: the same text alone or in any batch, with or without drafts, and whether the K largest
logits sufficed or the whole row was read.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from enginehouse_backends.engine.candidates import Candidates, candidates_of_top, k_largest, likely_then_all
from enginehouse_backends.engine.logits_processor import LogitsProcessor
from enginehouse_backends.engine.words import BadWords, WordMatching
from enginehouse_contract.errors import EngineFailureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import GenerationRequest
    from enginehouse_backends.engine.step import StepLogits
    from enginehouse_backends.tokenization.vocabulary import Vocabulary

_UNIFORM_BITS: Final = 53  # of a double's mantissa, so that a uniform number stays below 1


class SampledToken(NamedTuple):
    """A token and its log probability under the model's own distribution, before any processing."""

    token_id: int
    log_prob: float


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
        sampling = request.sampling
        self._sampling = sampling
        self._top_k = 1 if sampling.is_greedy else sampling.top_k
        self._temperature = 1.0 if sampling.is_greedy else sampling.temperature
        self._top_p = sampling.top_p
        self._end_id = request.end_id
        self._vocab_size = vocabulary.size
        self._stream = f"{seed}/{sequence_index}/".encode()
        self._position = 0
        bad_words = BadWords(vocabulary, request.bad_words, request.prompt_token_ids, matching=word_matching)
        self._processor = LogitsProcessor(request, bad_words)

    def accept(self, token_id: int) -> None:
        """Count a token as taken: penalties, bad words, the decay of top_p, and the position."""
        self._position += 1
        self._processor.accept(token_id)
        sampling = self._sampling
        if token_id == sampling.top_p_reset_id:
            self._top_p = sampling.top_p
        elif sampling.top_p_decay != 1.0:
            self._top_p = max(self._top_p * sampling.top_p_decay, sampling.top_p_min)

    def sample(self, logits: StepLogits, row: int) -> SampledToken:
        """Choose the token of the present position from one row; changes nothing.

        Raises :class:`EngineFailureError` when the row is not finite, and when every token is banned and the end id is
        missing or not yet allowed.
        """
        log_sum_exp = _finite_log_sum_exp(logits, row)
        if self._top_k == 1 and self._processor.is_identity:
            return SampledToken(int(logits.top_ids[row, 0]), float(logits.top_values[row, 0]) - log_sum_exp)
        uniform = 0.0 if self._top_k == 1 else self._uniform("draw")
        draws = (candidates.draw(self._top_p, uniform) for candidates in self._candidates(logits, row))
        token_id = next(token_id for token_id in draws if token_id is not None)
        return SampledToken(token_id, _log_prob(logits, row, token_id))

    def verify(
        self, logits: StepLogits, row: int, draft_id: int, draft_logits: NDArray[np.float32], threshold: float | None
    ) -> SampledToken:
        """Accept a draft drawn from another distribution, or draw what keeps the target's own distribution.

        Leviathan et al. 2023, algorithm 1: with target p and draft q accept with probability min(1, p/q), else draw
        from max(0, p - q). A *threshold* takes the place of the random number, as in TensorRT-LLM. Greedy: exact match.
        """
        if self._top_k == 1:
            return self.sample(logits, row)
        _finite_log_sum_exp(logits, row)
        nuclei = (candidates.nucleus(self._top_p) for candidates in self._candidates(logits, row))
        target = next(nucleus for nucleus in nuclei if nucleus is not None)
        p = target.weights / target.weights.sum()
        scaled = draft_logits.astype(np.float64) / self._temperature
        scaled = np.exp(scaled - scaled.max())
        q = scaled / scaled.sum()
        p_draft = float(p[target.token_ids == draft_id].sum())
        bar = self._uniform("accept") if threshold is None else threshold
        if p_draft >= bar * float(q[draft_id]) and p_draft > 0.0:
            return SampledToken(draft_id, _log_prob(logits, row, draft_id))
        residual = np.maximum(p - q[target.token_ids], 0.0)
        kept = Candidates(target.token_ids, residual if residual.any() else p, len(p))
        token_id = kept.draw(1.0, self._uniform("draw"))
        assert token_id is not None, "nothing was left out"
        return SampledToken(token_id, _log_prob(logits, row, token_id))

    def _uniform(self, purpose: str) -> float:
        digest = hashlib.blake2b(self._stream + f"{self._position}/{purpose}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> (64 - _UNIFORM_BITS)) / (1 << _UNIFORM_BITS)

    def _candidates(self, logits: StepLogits, row: int) -> Iterator[Candidates]:
        """Yield the row's candidates from ever more of it, until a choice among them is certain; the last ones are."""
        top_k, temperature = self._top_k, self._temperature
        top = candidates_of_top(logits, row, self._processor, temperature, self._vocab_size)
        if top is not None and top_k:
            top = top.limited_to(top_k)
        if top is not None:
            yield top
        values = logits.full_row(row).astype(np.float64)
        self._processor.apply_to_row(values)
        if values.max() == -math.inf:
            yield Candidates(np.array([self._end_of_the_road()]), np.ones(1), 1)
        elif top_k:
            yield k_largest(values, temperature, top_k)
        else:
            yield from likely_then_all(values, temperature)

    def _end_of_the_road(self) -> int:
        if self._end_id is not None and self._processor.may_end:
            return self._end_id
        reason = (
            "the request has no end id" if self._end_id is None else "the end id has to wait for the minimum length"
        )
        msg = f"every token is banned (bad words, embedding bias or minimum length) and {reason}."
        raise EngineFailureError(msg)


def _finite_log_sum_exp(logits: StepLogits, row: int) -> float:
    log_sum_exp = float(logits.log_sum_exp[row])
    if not math.isfinite(log_sum_exp):
        raise EngineFailureError("the model's logits are not finite numbers; the build, or this host, is broken.")
    return log_sum_exp


def _log_prob(logits: StepLogits, row: int, token_id: int) -> float:
    column = np.flatnonzero(logits.top_ids[row] == token_id)
    value = logits.top_values[row, column[0]] if len(column) else logits.full_row(row)[token_id]
    return float(value) - float(logits.log_sum_exp[row])
