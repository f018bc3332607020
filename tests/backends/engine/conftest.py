"""Helpers for tests of the planner: schedulers, sequences, and a model that computes from the KV it is pointed at."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from enginehouse_backends.engine.blocks import BlockPool
from enginehouse_backends.engine.request import GenerationRequest, RequestId, SequenceId
from enginehouse_backends.engine.scheduler import Scheduler, SchedulerConfig
from enginehouse_backends.engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from enginehouse_backends.engine.request import TokenIds
    from enginehouse_backends.engine.step import BlockId, SequenceSlice, StepPlan

VOCAB_SIZE = 50
_MASK = (1 << 64) - 1


def _mix(state: int, value: int) -> int:
    state = ((state ^ value) * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & _MASK
    return state ^ (state >> 29)


class FakeModel:
    """Computes plans over a dictionary of KV slots.

    The KV of a position is a hash of all KV before it, read through the block table, and of its token; the token after
    it is a function of both. So a wrong block, a stale slot, a skipped or a repeated token all change what follows.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.kv: dict[tuple[BlockId, int], int] = {}

    def run(self, plan: StepPlan) -> dict[SequenceId, list[int]]:
        """Return the predictions of each slice's logit rows; all reads happen before all writes."""
        writes: dict[tuple[BlockId, int], int] = {}
        predictions = {}
        for piece in plan.slices:
            num_positions = piece.num_past_tokens + len(piece.token_ids)
            assert len(piece.block_ids) == -(-num_positions // self.tokens_per_block)
            state = 0
            for position in range(piece.num_past_tokens):
                state = _mix(state, self.kv[self._slot(piece, position)])
            rows = []
            for position, token_id in enumerate(piece.token_ids, start=piece.num_past_tokens):
                kv = _mix(state, token_id)
                state = _mix(state, kv)
                slot = self._slot(piece, position)
                assert slot not in writes, f"two positions write slot {slot} in one step"
                writes[slot] = kv
                rows.append(state % VOCAB_SIZE)
            predictions[piece.sequence_id] = rows[len(rows) - piece.num_logit_rows :]
        self.kv.update(writes)
        return predictions

    def _slot(self, piece: SequenceSlice, position: int) -> tuple[BlockId, int]:
        return piece.block_ids[position // self.tokens_per_block], position % self.tokens_per_block


def continue_alone(prompt_token_ids: Seq[int], num_tokens: int, end_id: int | None = None) -> list[int]:
    """Return what the fake model generates after a prompt up to *end_id*, without blocks, steps or a planner."""
    token_ids, state = list(prompt_token_ids), 0
    for token_id in token_ids:
        state = _mix(state, _mix(state, token_id))
    for _ in range(num_tokens):
        token_ids.append(state % VOCAB_SIZE)
        if token_ids[-1] == end_id:
            break
        state = _mix(state, _mix(state, token_ids[-1]))
    return token_ids[len(prompt_token_ids) :]


def make_scheduler(
    *, num_blocks: int = 64, tokens_per_block: int = 4, enable_reuse: bool = True, **config: Any
) -> Scheduler:
    """Return a scheduler over a fresh pool whose clock counts its own readings: 1, 2, ..."""
    limits = {"max_num_tokens": 64, "max_batch_size": 8, "max_seq_len": 128, **config}
    pool = BlockPool(num_blocks, tokens_per_block, enable_reuse=enable_reuse)
    return Scheduler(SchedulerConfig(**limits), pool, clock_ns=itertools.count(1).__next__)


def make_sequence(
    sequence_id: int,
    num_prompt_tokens: int = 6,
    max_new_tokens: int = 4,
    *,
    first_token: int | None = None,
    **rest: Any,
) -> Sequence:
    """Return a sequence with the prompt *first_token*, *first_token* + 1, ...; by default no two share a token."""
    first_token = 1000 * (sequence_id + 1) if first_token is None else first_token
    request = GenerationRequest(
        request_id=RequestId(f"request-{sequence_id}"),
        prompt_token_ids=tuple(range(first_token, first_token + num_prompt_tokens)),
        max_new_tokens=max_new_tokens,
        **rest,
    )
    return Sequence(SequenceId(sequence_id), request)


def siblings_of(sequence: Sequence) -> list[Sequence]:
    """Return all sequences of the request of *sequence*, ids counted on from its own."""
    return [
        Sequence(SequenceId(sequence.sequence_id + index), sequence.request, index)
        for index in range(sequence.request.num_return_sequences)
    ]


@dataclass
class Simulation:
    """Drives a scheduler as the engine does, with the fake model, and checks every plan on the way."""

    scheduler: Scheduler
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    draft_chance: float = 0.0  # of a running sequence getting drafts for a step
    sequences: dict[SequenceId, Sequence] = field(default_factory=dict)  # all ever added
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = self.scheduler._tables.pool
        self.model = FakeModel(self.pool.tokens_per_block)
        self.num_context_rows = dict.fromkeys(self.sequences, 0)

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences."""
        for sequence in sequences:
            self.scheduler.add(sequence)
            self.sequences[sequence.sequence_id] = sequence
            self.num_context_rows[sequence.sequence_id] = 0

    def step(self) -> StepPlan | None:
        """Propose, schedule, run, sample, apply, finish; return the plan, or None when there was nothing to do."""
        self._propose()
        waited = {i for i, sequence in self.sequences.items() if sequence.status is SequenceStatus.WAITING}
        generating = {i for i, sequence in self.sequences.items() if sequence.num_uncomputed_tokens == 1}
        plan = self.scheduler.schedule()
        self.scheduler.audit()
        if plan is None:
            return None
        self._check_limits(plan)
        self._check_order(plan, waited, generating)
        self.plans.append(plan)
        predictions = self.model.run(plan)
        sampled = {}
        for piece in plan.slices:
            sequence, rows = self.sequences[piece.sequence_id], predictions[piece.sequence_id]
            if sequence.request.return_context_logits and not sequence.num_output_tokens:
                num_drafts = max(0, piece.num_past_tokens + len(piece.token_ids) - sequence.num_tokens)
                self.num_context_rows[piece.sequence_id] += len(rows) - num_drafts
            sampled[piece.sequence_id] = self._sample(sequence, piece, rows)
        self.scheduler.apply(plan, sampled)
        self.scheduler.audit()
        for piece in plan.slices:
            if self._is_complete(self.sequences[piece.sequence_id]):
                self.scheduler.finish(piece.sequence_id)
                self.scheduler.audit()
        return plan

    def run(self, max_steps: int = 5000) -> list[list[int]]:
        """Step until nothing is left; return the outputs of all sequences in the order they were added."""
        for _ in range(max_steps):
            if self.step() is None:
                assert not self.scheduler.has_work
                assert self.pool.num_used_blocks == 0
                return [self.output(sequence_id) for sequence_id in self.sequences]
        msg = f"{self.scheduler.num_waiting} waiting and {self.scheduler.num_running} running never finish"
        raise AssertionError(msg)

    def output(self, sequence_id: SequenceId) -> list[int]:
        """Return the tokens generated so far."""
        sequence = self.sequences[sequence_id]
        return sequence.token_ids[sequence.num_prompt_tokens :]

    def expected_output(self, sequence_id: SequenceId) -> list[int]:
        """Return the tokens the model generates for this sequence alone."""
        request = self.sequences[sequence_id].request
        return continue_alone(request.prompt_token_ids, request.max_new_tokens, request.end_id)

    def _is_complete(self, sequence: Sequence) -> bool:
        output = self.output(sequence.sequence_id)
        return len(output) == sequence.request.max_new_tokens or output[-1:] == [sequence.request.end_id]

    def _propose(self) -> None:
        for sequence in self.sequences.values():
            if sequence.status is not SequenceStatus.FINISHED and self.rng.random() < self.draft_chance:
                drafts = continue_alone(sequence.token_ids, self.rng.randint(1, 5))
                if self.rng.random() < 0.5:
                    drafts[self.rng.randrange(len(drafts))] = VOCAB_SIZE  # a token the model never makes
                sequence.draft_token_ids = tuple(drafts)

    def _sample(self, sequence: Sequence, piece: SequenceSlice, rows: list[int]) -> TokenIds:
        end = piece.num_past_tokens + len(piece.token_ids)
        if end < sequence.num_tokens:
            return ()
        drafts = sequence.draft_token_ids if end > sequence.num_tokens else ()
        tokens = []
        for row, draft in itertools.zip_longest(rows[len(rows) - 1 - len(drafts) :], drafts):
            tokens.append(row)
            if row == sequence.request.end_id or row != draft:
                break
        return tuple(tokens)

    def _check_limits(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert 0 < plan.num_tokens <= config.max_num_tokens
        assert self.scheduler.num_running <= config.max_batch_size
        for piece in plan.slices:
            sequence = self.sequences[piece.sequence_id]
            assert sequence.status is SequenceStatus.RUNNING
            assert piece.num_past_tokens == sequence.num_computed_tokens
            end = piece.num_past_tokens + len(piece.token_ids)
            assert end < sequence.num_prompt_tokens + sequence.request.max_new_tokens
            drafts = sequence.draft_token_ids if end > sequence.num_tokens else ()
            assert [*sequence.token_ids, *drafts][piece.num_past_tokens : end] == list(piece.token_ids)
            if not sequence.request.return_context_logits:
                assert piece.num_logit_rows == (1 + len(drafts) if end >= sequence.num_tokens else 0)
            if not config.enable_chunked_context and not sequence.num_preemptions:
                assert end >= sequence.num_tokens, "a prompt was split"

    def _check_order(self, plan: StepPlan, waited: set[SequenceId], generating: set[SequenceId]) -> None:
        planned = [piece.sequence_id for piece in plan.slices]
        assert len(set(planned)) == len(planned)
        started = waited & set(planned)
        for sequence in self.sequences.values():
            if sequence.status is SequenceStatus.WAITING and sequence.request.num_return_sequences == 1:
                overtaking = [i for i in started if self.sequences[i].queue_key > sequence.queue_key]
                assert not overtaking, f"{overtaking} started before {sequence.sequence_id}"
        running = {i for i, sequence in self.sequences.items() if sequence.status is SequenceStatus.RUNNING}
        left_out = running - set(planned)
        overtaken = [i for i in left_out for j in started if self.sequences[i].queue_key < self.sequences[j].queue_key]
        assert not overtaken, f"{started} started although {overtaken} could not go on"
        assert not (started and self.scheduler.iteration_stats().num_paused_sequences)
        if self.scheduler.config.policy == "guaranteed_no_evict":
            assert not any(sequence.num_preemptions for sequence in self.sequences.values())
            assert not left_out & generating


@pytest.fixture
def create_scheduler() -> Callable[..., Scheduler]:
    """See :func:`make_scheduler`."""
    return make_scheduler


@pytest.fixture
def create_sequence() -> Callable[..., Sequence]:
    """See :func:`make_sequence`."""
    return make_sequence


@pytest.fixture
def create_siblings() -> Callable[..., list[Sequence]]:
    """See :func:`siblings_of`."""
    return siblings_of


@pytest.fixture
def simulate() -> type[Simulation]:
    """See :class:`Simulation`."""
    return Simulation
