"""The engine: one thread that plans, computes, samples and applies steps; another that hands results out.

::

    submit/cancel --> inbox --> [ schedule -> run -> sample -> apply ] --> delivery --> on_output callbacks
                                        step thread               delivery thread

Callbacks run while the next forward pass computes (the runner releases the GIL). A step that fails ends only the
requests it touched. What it does not cover: tensors and Triton (`triton/`), text (`tokenization/`).
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from enginehouse_backends.engine.blocks import BlockPool
from enginehouse_backends.engine.delivery import Delivery
from enginehouse_backends.engine.request import FinishReason, SequenceId, SequenceOutput
from enginehouse_backends.engine.sampler import SequenceSampler
from enginehouse_backends.engine.scheduler import IterationStats, Scheduler, SchedulerConfig
from enginehouse_backends.engine.sequence import Sequence
from enginehouse_backends.engine.words import StopWords
from enginehouse_contract.errors import EnginehouseError, EngineUnavailableError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray
    from typing_extensions import Self

    from enginehouse_backends.engine.request import GenerationRequest, RequestId, TokenIds
    from enginehouse_backends.engine.step import Runner, SequenceSlice, StepLogits, StepPlan
    from enginehouse_backends.tokenization.vocabulary import Vocabulary

    OutputCallback = Callable[[SequenceOutput], None]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine serves; ``scheduler`` holds the step's limits and policy."""

    scheduler: SchedulerConfig
    enable_kv_cache_reuse: bool = True
    max_queue_size: int = 0  # requests waiting for their first step; 0 = unbounded


@dataclass(slots=True)
class _Generation:
    """One sequence in flight with everything that turns its logits into outputs."""

    sequence: Sequence
    sampler: SequenceSampler
    stop_words: StopWords
    on_output: OutputCallback
    stream: bool
    cum_log_prob: float = 0.0
    pending_token_ids: list[int] = field(default_factory=list)  # not handed out yet
    pending_log_probs: list[float] = field(default_factory=list)
    context_rows: list[NDArray[np.float32]] = field(default_factory=list)
    generation_rows: list[NDArray[np.float32]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_word: TokenIds | None = None


@dataclass(frozen=True, slots=True)
class _Submission:
    request: GenerationRequest
    on_output: OutputCallback
    stream: bool


class Engine:
    """In-flight batching over a runner. Thread-safe; close it (or use it as a context manager) to end its threads."""

    def __init__(self, runner: Runner, vocabulary: Vocabulary, config: EngineConfig) -> None:
        self.config = config
        self._runner = runner
        self._vocabulary = vocabulary
        self._pool = BlockPool(runner.num_blocks, runner.tokens_per_block, enable_reuse=config.enable_kv_cache_reuse)
        self._scheduler = Scheduler(config.scheduler, self._pool)
        self._generations: dict[SequenceId, _Generation] = {}
        self._sequence_ids: dict[RequestId, list[SequenceId]] = {}
        self._next_sequence_id = 0
        self._inbox: deque[_Submission | RequestId] = deque()  # a bare id cancels
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._num_queued_requests = 0
        self._iteration_stats = IterationStats()
        self._delivery = Delivery(self.cancel)
        self._step_thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._step_thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, request: GenerationRequest, on_output: OutputCallback, *, stream: bool = True) -> None:
        """Queue *request*; ``on_output`` is called from the delivery thread for every output of every sequence.

        With *stream* each step's tokens arrive as they are made, otherwise one output per sequence at its end.

        Raises :class:`InvalidRequestError` when the request can never fit, :class:`OverloadedError` when the queue is
        full, :class:`EngineUnavailableError` when the engine is closed or broken.
        """
        self._scheduler.check(request)
        with self._wake:
            self._check_open()
            limit = self.config.max_queue_size
            if limit and self._num_queued_requests >= limit:
                msg = f"the engine's queue is full; limit {limit} requests (`max_queue_size`). Try again later."
                raise OverloadedError(msg, retry_after_s=1.0)
            self._num_queued_requests += 1
            self._inbox.append(_Submission(request, on_output, stream))
            self._wake.notify()

    def cancel(self, request_id: RequestId) -> None:
        """End a request in flight: its sequences finish as CANCELLED after the running step; unknown ids are ignored."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def iteration_stats(self) -> IterationStats:
        """Return the statistics of the last step."""
        return self._iteration_stats

    @property
    def pool(self) -> BlockPool:
        """The block pool, for its counters."""
        return self._pool

    def close(self) -> None:
        """Cancel everything, end both threads, and return when they are gone."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._step_thread.join()
        self._delivery.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            msg = f"the engine stopped after an internal error ({self._failure}); reload the model."
            raise EngineUnavailableError(msg)
        if self._closing:
            msg = "the engine is shutting down."
            raise EngineUnavailableError(msg)

    # ---- step thread ----

    def _run(self) -> None:
        try:
            while self._take_inbox():
                plan = self._scheduler.schedule()
                if plan is not None:
                    self._step(plan)
                self._iteration_stats = self._scheduler.iteration_stats()
                self._num_queued_requests = self._scheduler.num_waiting
            reason, error = FinishReason.CANCELLED, None
        except BaseException as failure:
            _LOGGER.exception("the engine's step thread failed")
            with self._wake:
                self._failure = failure
            reason, error = FinishReason.ERROR, f"the engine stopped after an internal error ({type(failure).__name__})"
        self._finish_all(reason, error)

    def _take_inbox(self) -> bool:
        """Admit and cancel what arrived; wait while there is nothing to do. False when closing."""
        with self._wake:
            if not self._inbox and not self._closing and not self._scheduler.has_work:
                self._scheduler.audit()  # costs nothing while idle; a leak shows here first
                self._wake.wait_for(lambda: self._inbox or self._closing)
            messages = list(self._inbox)
            self._inbox.clear()
            if self._closing:
                self._inbox.extend(messages)
                return False
        for message in messages:
            if isinstance(message, _Submission):
                self._admit(message)
            else:
                self._finish_request(message, FinishReason.CANCELLED)
        return True

    def _admit(self, submission: _Submission) -> None:
        request = submission.request
        seed = request.sampling.seed
        seed = secrets.randbits(64) if seed is None else seed
        ids = self._sequence_ids.setdefault(request.request_id, [])
        for index in range(request.num_return_sequences):
            sequence_id = SequenceId(self._next_sequence_id)
            self._next_sequence_id += 1
            sequence = Sequence(sequence_id, request, index)
            self._generations[sequence_id] = _Generation(
                sequence,
                SequenceSampler(request, index, self._vocabulary, seed),
                StopWords(self._vocabulary, request.stop_words, request.end_id),
                submission.on_output,
                submission.stream,
            )
            ids.append(sequence_id)
            self._scheduler.add(sequence)

    def _step(self, plan: StepPlan) -> None:
        try:
            logits = self._runner.run(plan)
        except Exception as error:  # whatever the runtime raised ends only the requests of this step
            _LOGGER.exception("a forward pass failed")
            self._fail(plan.slices, error)
            return
        sampled: dict[SequenceId, TokenIds] = {}
        row = 0
        for piece in plan.slices:
            generation = self._generations[piece.sequence_id]
            try:
                sampled[piece.sequence_id] = self._sample(generation, piece, logits, row)
            except Exception as error:  # one sequence's sampling must not end the others
                _LOGGER.exception("sampling failed for request %s", generation.sequence.request.request_id)
                self._fail((piece,), error)
            row += piece.num_logit_rows
        self._scheduler.apply(plan, sampled)
        self._emit(sampled)

    def _sample(self, generation: _Generation, piece: SequenceSlice, logits: StepLogits, row: int) -> TokenIds:
        """Turn one slice's rows into tokens: one, or with drafts the accepted ones and one more, or none yet."""
        sequence, request = generation.sequence, generation.sequence.request
        end = piece.num_past_tokens + len(piece.token_ids)
        drafts = sequence.draft_token_ids if end > sequence.num_tokens else ()
        if request.return_context_logits and piece.num_past_tokens < sequence.num_prompt_tokens:
            generation.context_rows.extend(logits.full_row(row + i) for i in range(piece.num_logit_rows))
        if end < sequence.num_tokens:
            return ()  # the prompt (or a recomputation) is not finished
        first = row + piece.num_logit_rows - 1 - len(drafts)
        tokens: list[int] = []
        for position in range(len(drafts) + 1):
            token = generation.sampler.sample(logits, first + position)
            tokens.append(token.token_id)
            self._record(generation, token.token_id, token.log_prob, logits, first + position, len(tokens))
            if generation.finish_reason is not None:
                break
            if position < len(drafts) and drafts[position] != token.token_id:
                break
        return tuple(tokens)

    def _record(
        self, generation: _Generation, token_id: int, log_prob: float, logits: StepLogits, row: int, num_new: int
    ) -> None:
        request = generation.sequence.request
        generation.sampler.accept(token_id)
        generation.pending_token_ids.append(token_id)
        generation.cum_log_prob += log_prob
        if request.return_log_probs:
            generation.pending_log_probs.append(log_prob)
        if request.return_generation_logits:
            generation.generation_rows.append(logits.full_row(row))
        num_output_tokens = generation.sequence.num_output_tokens + num_new
        stop_word = generation.stop_words.push(token_id)
        if stop_word is not None and num_output_tokens >= request.min_new_tokens:
            generation.finish_reason, generation.stop_word = FinishReason.STOP, stop_word
        elif num_output_tokens >= request.max_new_tokens:
            generation.finish_reason = FinishReason.LENGTH

    def _emit(self, sampled: dict[SequenceId, TokenIds]) -> None:
        batch: list[tuple[OutputCallback, SequenceOutput]] = []
        for sequence_id, token_ids in sampled.items():
            generation = self._generations.get(sequence_id)
            if generation is None or not token_ids:
                continue
            if generation.finish_reason is not None:
                batch.append((generation.on_output, self._finish(generation)))
            elif generation.stream:
                batch.append((generation.on_output, self._take_output(generation)))
        if batch:
            self._delivery.put(batch)

    def _take_output(self, generation: _Generation, error: str | None = None) -> SequenceOutput:
        sequence, request = generation.sequence, generation.sequence.request
        output = SequenceOutput(
            request_id=request.request_id,
            sequence_index=sequence.sequence_index,
            token_ids=tuple(generation.pending_token_ids),
            log_probs=tuple(generation.pending_log_probs),
            finish_reason=generation.finish_reason,
            stop_word=generation.stop_word,
            error=error,
            stats=sequence.stats(),
            cum_log_prob=generation.cum_log_prob,
            context_logits=_stack(generation.context_rows),
            generation_logits=_stack(generation.generation_rows),
        )
        generation.pending_token_ids.clear()
        generation.pending_log_probs.clear()
        generation.context_rows.clear()
        generation.generation_rows.clear()
        return output

    def _finish(self, generation: _Generation, error: str | None = None) -> SequenceOutput:
        """Take a sequence out of everything and return its last output."""
        sequence_id = generation.sequence.sequence_id
        self._scheduler.finish(sequence_id)
        del self._generations[sequence_id]
        request_id = generation.sequence.request.request_id
        siblings = self._sequence_ids[request_id]
        siblings.remove(sequence_id)
        if not siblings:
            del self._sequence_ids[request_id]
        return self._take_output(generation, error)

    def _finish_request(self, request_id: RequestId, reason: FinishReason) -> None:
        self._finish_many(list(self._sequence_ids.get(request_id, ())), reason, None)

    def _fail(self, slices: Iterable[SequenceSlice], error: Exception) -> None:
        text = (
            str(error) if isinstance(error, EnginehouseError) else f"the step failed ({type(error).__name__}: {error})"
        )
        self._finish_many([piece.sequence_id for piece in slices], FinishReason.ERROR, text)

    def _finish_many(self, sequence_ids: list[SequenceId], reason: FinishReason, error: str | None) -> None:
        batch = []
        for sequence_id in sequence_ids:
            generation = self._generations[sequence_id]
            generation.finish_reason = reason
            batch.append((generation.on_output, self._finish(generation, error)))
        if batch:
            self._delivery.put(batch)

    def _finish_all(self, reason: FinishReason, error: str | None) -> None:
        """Answer everything in flight and everything still in the inbox when the step thread ends."""
        with self._wake:
            self._closing = True
            submissions = [message for message in self._inbox if isinstance(message, _Submission)]
            self._inbox.clear()
        batch: list[tuple[OutputCallback, SequenceOutput]] = []
        for generation in self._generations.values():
            generation.finish_reason = reason
            batch.append((generation.on_output, self._take_output(generation, error)))
        for submission in submissions:
            batch.extend(
                (
                    submission.on_output,
                    SequenceOutput(
                        request_id=submission.request.request_id,
                        sequence_index=index,
                        token_ids=(),
                        finish_reason=reason,
                        error=error,
                    ),
                )
                for index in range(submission.request.num_return_sequences)
            )
        self._generations.clear()
        self._sequence_ids.clear()
        self._delivery.put(batch)


def _stack(rows: list[NDArray[np.float32]]) -> NDArray[np.float32] | None:
    if not rows:
        return None
    return np.stack(rows)
