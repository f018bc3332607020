"""What a caller asks of the engine and what it gets back: plain values, no behaviour.

A :class:`GenerationRequest` becomes ``num_return_sequences`` sequences. Everything here is already validated:
``triton/engine_request.py`` is where raw tensors become these types.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)
TokenIds = tuple[int, ...]


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"  # end id or a stop word
    LENGTH = "length"  # max_new_tokens, or the window is full
    CANCELLED = "cancelled"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How each next token is chosen. Defaults choose greedily and change nothing.

    Probabilities are processed in TensorRT-LLM's order: embedding bias, repetition / presence / frequency penalty,
    minimum length and bad words, temperature, top-k, top-p.
    """

    top_k: int = 1  # 1 = greedy, 0 = all tokens
    top_p: float = 1.0  # (0, 1]; 1 = off
    top_p_min: float = 1e-6  # floor of the decaying top_p
    top_p_decay: float = 1.0  # top_p *= decay after each token; 1 = off
    top_p_reset_id: int | None = None  # this token sets top_p back to its start
    temperature: float = 1.0  # 0 = greedy
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens seen in prompt or output
    presence_penalty: float = 0.0  # subtracted once from tokens seen in prompt or output
    frequency_penalty: float = 0.0  # subtracted per occurrence in prompt or output
    seed: int | None = None  # None: drawn when the request is made
    embedding_bias: NDArray[np.float32] | None = None  # [vocab], added to the logits

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.top_k == 1 or self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request: a prompt, how to continue it, when to stop, and what to report."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    max_new_tokens: int
    min_new_tokens: int = 0  # no end id or stop word before this many
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_id: int | None = None
    stop_words: tuple[TokenIds, ...] = ()
    bad_words: tuple[TokenIds, ...] = ()
    num_return_sequences: int = 1
    priority: int = 0  # Triton's sense: 1 = highest, larger = later, 0 = the default level (after all stated ones)
    arrival_time_ns: int = 0  # monotonic clock
    draft_token_ids: TokenIds = ()  # guesses of what follows the prompt, made elsewhere
    draft_logits: NDArray[np.float32] | None = None  # [len(draft_token_ids), vocab] that they were drawn from
    draft_acceptance_threshold: float | None = None  # accept at this p/q ratio; None: at a random one
    speculate_ngram: bool | None = None  # draft by prompt lookup; None: as the engine is set
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """Counts and times of one sequence, as perf metrics and accounting need them. Times: monotonic ns, 0 = not yet."""

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0  # prompt tokens whose KV came from the prefix cache at first admission
    num_output_tokens: int = 0
    num_recomputed_tokens: int = 0  # computed again after a preemption
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_preemptions: int = 0
    num_allocated_blocks: int = 0
    num_new_blocks: int = 0
    num_reused_blocks: int = 0
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    machine_time_ns: int = 0  # this sequence's part of the steps it was in
    energy_uj: int | None = None  # likewise; None: nothing tells
    is_energy_estimated: bool = False  # declared rather than measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """New tokens of one sequence after one step; the last one carries ``finish_reason`` and the final ``stats``."""

    request_id: RequestId
    sequence_index: int  # 0 .. num_return_sequences - 1
    token_ids: TokenIds  # new since the last output of this sequence; may be empty only when finished
    log_probs: tuple[float, ...] = ()  # of token_ids, natural log; empty unless asked for
    finish_reason: FinishReason | None = None
    stop_word: TokenIds | None = None  # the stop word that ended it, or the end id as a single
    error: str | None = None  # when finish_reason is ERROR
    stats: SequenceStats = field(default_factory=SequenceStats)
    cum_log_prob: float = 0.0
    context_logits: NDArray[np.float32] | None = None  # [num_prompt_tokens, vocab], with the first output
    generation_logits: NDArray[np.float32] | None = None  # [len(token_ids), vocab]
