"""The planner: which tokens of which sequences the next forward pass computes.

There is no prefill and no decode mode. Every sequence has tokens known and tokens computed; a step spends a budget of
tokens to close the gaps: first one token for each sequence that lacks just one, then drafts, then prompts, under way
or new, by priority, then arrival. Chunked prompts, prefix reuse, speculation and recomputation all follow from that.

``schedule`` plans and takes blocks, ``apply`` folds the results in; both change the planner's own queues, sequences
and block tables only. What it does not cover: running the plan (`runner.py`) and choosing tokens (`sampler.py`).
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from enginehouse_backends.engine.block_tables import BlockTables
from enginehouse_backends.engine.scheduler_config import SchedulerConfig
from enginehouse_backends.engine.sequence import Sequence, SequenceStatus
from enginehouse_backends.engine.step import StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from enginehouse_backends.engine.blocks import BlockPool
    from enginehouse_backends.engine.request import GenerationRequest, SequenceId, TokenIds
    from enginehouse_backends.engine.step import SequenceSlice

__all__ = ["IterationStats", "Scheduler", "SchedulerConfig"]

_queue_key = attrgetter("queue_key")


@dataclass(frozen=True, slots=True)
class IterationStats:
    """What the last step held (TensorRT-LLM's iteration statistics) and what waits and runs now."""

    iteration: int = 0  # steps planned so far
    num_scheduled_sequences: int = 0
    num_context_sequences: int = 0  # of those scheduled: computing a prompt, or computing again after a pause
    num_generation_sequences: int = 0  # of those scheduled: the others
    num_context_tokens: int = 0  # computed for num_context_sequences
    num_paused_sequences: int = 0  # paused by the step for want of blocks
    num_active_sequences: int = 0  # running now
    num_waiting_sequences: int = 0  # waiting now, paused ones included


@dataclass(slots=True)
class _Step:
    """The step being planned: how many tokens each sequence was granted, and what is left to grant."""

    num_tokens_left: int
    granted: dict[SequenceId, int] = field(default_factory=dict)
    num_context_sequences: int = 0
    num_context_tokens: int = 0
    num_paused_sequences: int = 0
    is_out_of_blocks: bool = False

    def grant(self, sequence: Sequence, num_tokens: int) -> None:
        self.granted[sequence.sequence_id] = self.granted.get(sequence.sequence_id, 0) + num_tokens
        self.num_tokens_left -= num_tokens

    def grant_context(self, sequence: Sequence, num_tokens: int) -> None:
        self.grant(sequence, num_tokens)
        self.num_context_sequences += 1
        self.num_context_tokens += num_tokens


class Scheduler:
    """Plans steps over a block pool that nobody else allocates from. Not thread-safe, except :meth:`check`."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.config = config
        self._tables = BlockTables(pool)
        self._clock_ns = clock_ns
        self._sequences: dict[SequenceId, Sequence] = {}
        self._waiting: list[Sequence] = []  # both lists sorted by queue_key
        self._running: list[Sequence] = []
        self._iteration = 0
        self._last_step = _Step(0)

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks: not started yet, or paused."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether :meth:`schedule` would return a plan."""
        return bool(self._sequences)

    def iteration_stats(self) -> IterationStats:
        """Return the statistics of the last step."""
        step = self._last_step
        return IterationStats(
            iteration=self._iteration,
            num_scheduled_sequences=len(step.granted),
            num_context_sequences=step.num_context_sequences,
            num_generation_sequences=len(step.granted) - step.num_context_sequences,
            num_context_tokens=step.num_context_tokens,
            num_paused_sequences=step.num_paused_sequences,
            num_active_sequences=len(self._running),
            num_waiting_sequences=len(self._waiting),
        )

    def check(self, request: GenerationRequest) -> None:
        """Raise :class:`InvalidRequestError` when *request* could never be served; safe from any thread."""
        pool = self._tables.pool
        self.config.check(request, pool.num_blocks * pool.tokens_per_block)

    def add(self, sequence: Sequence) -> None:
        """Queue *sequence*; raises as :meth:`check` does, and changes nothing then."""
        self.check(sequence.request)
        assert sequence.sequence_id not in self._sequences, f"sequence {sequence.sequence_id} was added twice"
        self._sequences[sequence.sequence_id] = sequence
        insort(self._waiting, sequence, key=_queue_key)

    def finish(self, sequence_id: SequenceId) -> Sequence:
        """Take a waiting or running sequence out, free its blocks, and return it."""
        sequence = self._sequences.pop(sequence_id)
        _remove(self._running if sequence.status is SequenceStatus.RUNNING else self._waiting, sequence)
        self._tables.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        return sequence

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or return None when there is no sequence at all."""
        if not self._sequences:
            return None
        step = _Step(self.config.max_num_tokens)
        generating = [sequence for sequence in self._running if sequence.num_uncomputed_tokens == 1]
        catching_up = [sequence for sequence in self._running if sequence.num_uncomputed_tokens > 1]
        for sequence in generating:
            if self._make_room(step, sequence, 1):
                step.grant(sequence, 1)
        for sequence in generating:
            if sequence.draft_token_ids and sequence.sequence_id in step.granted:
                self._grant_drafts(step, sequence)
        for sequence in catching_up:
            self._start_waiting(step, before=sequence)
            if num_tokens := self._make_room(step, sequence, sequence.num_uncomputed_tokens):
                step.grant_context(sequence, num_tokens)
                self._grant_drafts(step, sequence)
        self._start_waiting(step)
        assert step.granted, f"{len(self._running)} running and {len(self._waiting)} waiting, but nothing can be done"
        self._iteration += 1
        self._last_step = step
        return StepPlan(tuple(self._slice(sequence_id, count) for sequence_id, count in step.granted.items()))

    def apply(self, plan: StepPlan, sampled: Mapping[SequenceId, TokenIds]) -> None:
        """Fold a computed plan and the tokens sampled from it in; sequences finished since are skipped.

        *sampled* has one token for each slice that reached its sequence's last known token, more where drafts were
        accepted; nothing or an empty tuple for the others.
        """
        now_ns = self._clock_ns()
        for piece in plan.slices:
            sequence = self._sequences.get(piece.sequence_id)
            if sequence is None:
                continue
            num_computed_before = sequence.num_computed_tokens
            end = piece.num_past_tokens + len(piece.token_ids)
            sequence.advance(end, sampled.get(piece.sequence_id, ()), now_ns)
            self._tables.register_full_blocks(sequence, num_computed_before)

    def audit(self) -> None:
        """Recompute the pool's counters and this planner's invariants; raise AssertionError with what differs."""
        self._tables.audit(self._running)
        assert len(self._running) + len(self._waiting) == len(self._sequences), (
            f"{len(self._running)} running + {len(self._waiting)} waiting != {len(self._sequences)} sequences"
        )
        for queue, status in ((self._running, SequenceStatus.RUNNING), (self._waiting, SequenceStatus.WAITING)):
            assert queue == sorted(queue, key=_queue_key), f"the {status.value} queue is out of order"
            for sequence in queue:
                assert sequence.status is status, f"sequence {sequence.sequence_id} is not {status.value}"
        assert not any(sequence.block_ids or sequence.num_computed_tokens for sequence in self._waiting), (
            "a waiting sequence holds blocks or is said to be computed"
        )
        if self.config.policy == "guaranteed_no_evict":
            reserved, free = self._tables.num_blocks_to_come(*self._running), self._tables.pool.num_free_blocks
            assert reserved <= free, f"{reserved} blocks are promised but {free} are free"

    def _make_room(self, step: _Step, sequence: Sequence, num_wanted: int) -> int:
        """Take slots for a running sequence's next tokens, pausing others behind it for the first; return how many.

        Where everybody behind it was served already, it is left out of this step and keeps what it has: the served
        ones make room as they end. The first in order of those left out can pause all others, so some step is made.
        """
        num_tokens = min(num_wanted, step.num_tokens_left)
        if not num_tokens or sequence.status is not SequenceStatus.RUNNING:
            return 0
        while not (num_slots := self._tables.num_slots_within_reach(sequence)):
            step.is_out_of_blocks = True
            victim = next(other for other in reversed(self._running) if other.sequence_id not in step.granted)
            if victim is sequence:
                return 0
            self._pause(victim)
            step.num_paused_sequences += 1
        num_tokens = min(num_tokens, num_slots)
        self._tables.take_slots(sequence, num_tokens)
        return num_tokens

    def _grant_drafts(self, step: _Step, sequence: Sequence) -> None:
        """Grant drafts behind a sequence's last known token, as far as budget and free blocks go; cut the rest.

        None yet for one whose last known token is not in this step.

        All may be accepted, and one more token follows them, so drafts must leave one of the tokens it may still make.
        That keeps them within ``max_computed_tokens``, and so within what ``guaranteed_no_evict`` promised.
        """
        num_known = step.granted.get(sequence.sequence_id, 0)
        if not sequence.draft_token_ids or num_known < sequence.num_uncomputed_tokens:
            return
        num_drafts = min(
            len(sequence.draft_token_ids),
            sequence.max_computed_tokens - sequence.num_tokens,
            step.num_tokens_left,
            self._tables.num_slots_within_reach(sequence) - num_known,
        )
        sequence.draft_token_ids = sequence.draft_token_ids[:num_drafts]
        self._tables.take_slots(sequence, num_known + num_drafts)
        step.grant(sequence, num_drafts)

    def _start_waiting(self, step: _Step, before: Sequence | None = None) -> None:
        """Start waiting sequences in order until one has to wait for budget or blocks: none behind it overtakes it.

        Only those before *before*, if given, and none at all once a running one was short of blocks. One that waits for
        a sibling's prompt, which it is about to share, holds up nobody.
        """
        max_running = min(self.config.max_batch_size, self.config.max_num_tokens)  # each can generate in every step
        index = 0
        while index < len(self._waiting) and len(self._running) < max_running and step.num_tokens_left:
            sequence = self._waiting[index]
            if step.is_out_of_blocks or (before is not None and sequence.queue_key > before.queue_key):
                return
            if self._awaits_sibling(sequence):
                index += 1
            elif num_tokens := self._start(sequence, step.num_tokens_left):
                step.grant_context(sequence, num_tokens)
                del self._waiting[index]
                insort(self._running, sequence, key=_queue_key)
                self._grant_drafts(step, sequence)
            else:
                return

    def _start(self, sequence: Sequence, num_tokens_left: int) -> int:
        """Take the cached prefix, and slots for the tokens after it that the step may hold; return how many.

        0 and no change when it cannot start now.
        """
        tables, pool = self._tables, self._tables.pool
        prefix = tables.match_prefix(sequence)
        num_wanted = sequence.num_tokens - prefix.num_tokens
        num_tokens = min(num_wanted, num_tokens_left)
        # Without chunks all or nothing, except a recomputation that no step could hold at once.
        if num_tokens < num_wanted <= self.config.max_num_tokens and not self.config.enable_chunked_context:
            return 0
        if self.config.policy == "guaranteed_no_evict":
            num_blocks = tables.num_blocks_to_come(sequence, *self._running)
        else:
            num_blocks = tables.num_blocks_for(prefix.num_tokens + num_tokens)
        if num_blocks - len(prefix.block_ids) + pool.num_free_among(prefix.block_ids) > pool.num_free_blocks:
            return 0
        tables.start(sequence, prefix)
        tables.take_slots(sequence, num_tokens)
        sequence.status = SequenceStatus.RUNNING
        sequence.first_scheduled_time_ns = sequence.first_scheduled_time_ns or self._clock_ns()
        return num_tokens

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """Whether a sequence of the same request is computing full blocks of the prompt that this one could share."""
        request = sequence.request
        if request.num_return_sequences == 1 or request.return_context_logits or not self._tables.pool.enable_reuse:
            return False
        num_shareable = self._tables.num_shareable_tokens(sequence.num_prompt_tokens)
        return any(other.request is request and other.num_computed_tokens < num_shareable for other in self._running)

    def _pause(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks away; it keeps its tokens and its place in the order."""
        assert self.config.policy == "max_utilization", f"sequence {sequence.sequence_id} was promised its blocks"
        _remove(self._running, sequence)
        self._tables.release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        insort(self._waiting, sequence, key=_queue_key)

    def _slice(self, sequence_id: SequenceId, num_tokens: int) -> SequenceSlice:
        sequence = self._sequences[sequence_id]
        return sequence.slice(num_tokens, self._tables.num_blocks_for(sequence.num_computed_tokens + num_tokens))


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(queue, sequence.queue_key, key=_queue_key)
    assert queue[index] is sequence, f"sequence {sequence.sequence_id} is not where it belongs in its queue"
    del queue[index]
