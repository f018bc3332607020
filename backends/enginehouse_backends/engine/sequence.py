"""One sequence in flight: its tokens, how far they are computed, its blocks, and its counts.

::

    token_ids   [ prompt .............. )[ output ...... )      draft_token_ids [ guesses )
    positions   0 ..... num_computed_tokens ..... num_tokens ................. num_tokens + drafts
                [ KV in block_ids      )[ uncomputed     )

After a step the newest token is known but not computed: its KV is made by the step that predicts its successor.
Every token a step computed for a sequence is in exactly one class::

    tokens computed = peak_computed_tokens - num_cached_prompt_tokens
                    + num_recomputed_tokens + num_draft_tokens - num_accepted_draft_tokens

The planner changes these fields; others read them, except ``draft_token_ids``, which a proposer sets between steps.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginehouse_backends.engine.blocks import ROOT_DIGEST, BlockDigest, block_digest
from enginehouse_backends.engine.request import SequenceStats
from enginehouse_backends.engine.step import SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from enginehouse_backends.engine.request import GenerationRequest, SequenceId, TokenIds
    from enginehouse_backends.engine.step import BlockId


class SequenceStatus(enum.Enum):
    """Where a sequence stands; a paused one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one of a request's ``num_return_sequences`` continuations. Ids are given in order of arrival."""

    sequence_id: SequenceId
    request: GenerationRequest
    sequence_index: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0  # of token_ids, whose KV is in block_ids now
    peak_computed_tokens: int = 0  # the most num_computed_tokens ever was; what lies below is computed again
    block_ids: list[BlockId] = field(default_factory=list)
    draft_token_ids: TokenIds = ()  # guesses for the next step; schedule() cuts them to those it takes
    num_cached_prompt_tokens: int = 0  # found in the cache and never computed for this sequence
    num_recomputed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_preemptions: int = 0
    num_new_blocks: int = 0
    num_reused_blocks: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0
    _block_digests: list[BlockDigest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self.draft_token_ids = self.request.draft_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the request came with."""
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is missing: 1 while generating, more in a prompt or a recomputation."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_computed_tokens(self) -> int:
        """Tokens whose KV this sequence may need at most; the last token generated is never fed to the model."""
        return len(self.request.prompt_token_ids) + self.request.max_new_tokens - 1

    @property
    def queue_key(self) -> tuple[int, int]:
        """What the planner sorts by: stated priorities first (1 = highest), then the order of arrival."""
        return (self.request.priority or sys.maxsize, self.sequence_id)

    def block_digests(self, num_blocks: int, tokens_per_block: int) -> Seq[BlockDigest]:
        """Return the digests of the first *num_blocks* blocks, all full; each is computed once."""
        digests = self._block_digests
        while len(digests) < num_blocks:
            start = len(digests) * tokens_per_block
            parent = digests[-1] if digests else ROOT_DIGEST
            digests.append(block_digest(parent, self.token_ids[start : start + tokens_per_block]))
        return digests[:num_blocks]

    def slice(self, num_tokens: int, num_blocks: int) -> SequenceSlice:
        """Return the step's share of this sequence: its next *num_tokens* tokens, drafts behind the last known one.

        Logits are wanted from the last known token on; with context logits for every token that was never computed
        before (rows below the peak were answered before a pause).
        """
        past, num_known = self.num_computed_tokens, len(self.token_ids)
        end = past + num_tokens
        num_drafts = max(0, end - num_known)
        num_logit_rows = 1 + num_drafts if end >= num_known else 0
        if self.request.return_context_logits:
            num_logit_rows = max(num_logit_rows, end - max(past, self.peak_computed_tokens))
        return SequenceSlice(
            sequence_id=self.sequence_id,
            token_ids=(*self.token_ids[past:end], *self.draft_token_ids[:num_drafts]),
            num_past_tokens=past,
            block_ids=tuple(self.block_ids[:num_blocks]),
            num_logit_rows=num_logit_rows,
        )

    def advance(self, end: int, sampled: TokenIds, now_ns: int) -> None:
        """Fold in one step that computed the positions up to *end* (drafts included) and sampled these tokens.

        With drafts, *sampled* is those accepted and one more, or fewer when the sequence ended among them. The KV of
        rejected drafts stays behind ``num_computed_tokens`` and is overwritten.
        """
        num_drafts = max(0, end - self.num_tokens)
        drafts = self.draft_token_ids[:num_drafts]
        if sampled:
            self.draft_token_ids = ()
        assert bool(sampled) == (end >= self.num_tokens), f"{len(sampled)} tokens sampled at {end} of {self.num_tokens}"
        assert sampled[:-1] == drafts[: max(0, len(sampled) - 1)], f"sampled {sampled} does not follow drafts {drafts}"
        num_accepted = _num_equal(drafts, sampled)
        end_of_known = end - num_drafts
        self.num_recomputed_tokens += max(0, min(end_of_known, self.peak_computed_tokens) - self.num_computed_tokens)
        self.num_computed_tokens = end_of_known + num_accepted
        self.peak_computed_tokens = max(self.peak_computed_tokens, self.num_computed_tokens)
        self.num_draft_tokens += num_drafts
        self.num_accepted_draft_tokens += num_accepted
        if sampled:
            self.token_ids.extend(sampled)
            assert self.num_output_tokens <= self.request.max_new_tokens, f"sequence {self.sequence_id} was not stopped"
            self.first_token_time_ns = self.first_token_time_ns or now_ns
            self.last_token_time_ns = now_ns

    def stats(self) -> SequenceStats:
        """Return the counts and times so far."""
        return SequenceStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_prompt_tokens=self.num_cached_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens,
            num_preemptions=self.num_preemptions,
            num_allocated_blocks=self.num_new_blocks + self.num_reused_blocks,
            num_new_blocks=self.num_new_blocks,
            num_reused_blocks=self.num_reused_blocks,
            arrival_time_ns=self.request.arrival_time_ns,
            first_scheduled_time_ns=self.first_scheduled_time_ns,
            first_token_time_ns=self.first_token_time_ns,
            last_token_time_ns=self.last_token_time_ns,
        )


def _num_equal(drafts: TokenIds, sampled: TokenIds) -> int:
    """Return the length of the common prefix."""
    count = 0
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token:
            break
        count += 1
    return count
