"""One sequence in flight with everything that turns its logits into tokens, ends and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from enginehouse_backends.engine.request import FinishReason, SequenceOutput, SequenceStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import RequestId, TokenIds
    from enginehouse_backends.engine.sampler import SampledToken, SequenceSampler
    from enginehouse_backends.engine.sequence import Sequence
    from enginehouse_backends.engine.step import SequenceSlice, StepLogits
    from enginehouse_backends.engine.words import StopWords
    from enginehouse_backends.speculation.ngram import NgramProposer

    OutputCallback = Callable[[SequenceOutput], None]


_NO_STATS = SequenceStats()


@dataclass(slots=True)
class Generation:
    """Owned by the engine's step thread."""

    sequence: Sequence
    sampler: SequenceSampler
    stop_words: StopWords
    on_output: OutputCallback
    stream: bool
    proposer: NgramProposer | None = None
    finish_reason: FinishReason | None = None
    stop_word: TokenIds | None = None
    cum_log_prob: float = 0.0
    _token_ids: list[int] = field(default_factory=list)  # not handed out yet
    _log_probs: list[float] = field(default_factory=list)
    _context_rows: list[NDArray[np.float32]] = field(default_factory=list)
    _generation_rows: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def delivery_key(self) -> tuple[RequestId, int]:
        """What outputs of this sequence are known by."""
        return self.sequence.request.request_id, self.sequence.sequence_index

    def sample(self, piece: SequenceSlice, logits: StepLogits, first_row: int) -> TokenIds:
        """Turn one slice's rows into tokens: one, or with drafts the accepted ones and one more, or none yet.

        A draft is accepted when it is the token that sampling from the model's own distribution gives at its position.
        That leaves the output's distribution as it is, and, since each position has its own random number, even the
        output itself.
        """
        sequence, request = self.sequence, self.sequence.request
        end = piece.num_past_tokens + len(piece.token_ids)
        drafts = piece.token_ids[len(piece.token_ids) - max(0, end - sequence.num_tokens) :]
        if request.return_context_logits and not sequence.num_output_tokens:
            num_prompt_rows = piece.num_logit_rows - len(drafts)
            self._context_rows.extend(logits.full_row(first_row + i) for i in range(num_prompt_rows))
        if end < sequence.num_tokens:
            return ()  # the prompt (or a recomputation) is not finished
        row = first_row + piece.num_logit_rows - 1 - len(drafts)
        tokens: list[int] = []
        for draft in (*drafts, None):
            token = self._choose(logits, row + len(tokens), draft, len(tokens))
            if request.return_generation_logits:
                self._generation_rows.append(logits.full_row(row + len(tokens)))
            tokens.append(token.token_id)
            self._accept(token.token_id, token.log_prob, sequence.num_output_tokens + len(tokens))
            if self.finish_reason is not None or draft != token.token_id:
                break
        if self.proposer is not None:
            self.proposer.extend(tokens)
        return tuple(tokens)

    def take_output(self, error: str | None = None) -> SequenceOutput:
        """Return what was not handed out yet."""
        output = SequenceOutput(
            request_id=self.sequence.request.request_id,
            sequence_index=self.sequence.sequence_index,
            token_ids=tuple(self._token_ids),
            log_probs=tuple(self._log_probs),
            finish_reason=self.finish_reason,
            stop_word=self.stop_word,
            error=error,
            stats=self.sequence.stats() if self.finish_reason is not None else _NO_STATS,
            cum_log_prob=self.cum_log_prob,
            context_logits=np.stack(self._context_rows) if self._context_rows else None,
            generation_logits=np.stack(self._generation_rows) if self._generation_rows else None,
        )
        self._token_ids.clear()
        self._log_probs.clear()
        self._context_rows.clear()
        self._generation_rows.clear()
        return output

    def _choose(self, logits: StepLogits, row: int, draft: int | None, index: int) -> SampledToken:
        request = self.sequence.request
        if draft is None or request.draft_logits is None or self.sequence.num_output_tokens:
            return self.sampler.sample(logits, row)
        return self.sampler.verify(logits, row, draft, request.draft_logits[index], request.draft_acceptance_threshold)

    def _accept(self, token_id: int, log_prob: float, num_output_tokens: int) -> None:
        request = self.sequence.request
        self.sampler.accept(token_id)
        self._token_ids.append(token_id)
        self.cum_log_prob += log_prob
        if request.return_log_probs:
            self._log_probs.append(log_prob)
        stop_word = self.stop_words.push(token_id)
        if stop_word is not None and num_output_tokens >= request.min_new_tokens:
            self.finish_reason, self.stop_word = FinishReason.STOP, stop_word
        elif num_output_tokens >= request.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
