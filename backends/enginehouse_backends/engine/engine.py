"""The engine: one thread that plans, computes, samples and applies steps; another that hands results out.

::

    submit/cancel --> inbox --> [ schedule -> run -> sample -> apply ] --> delivery --> on_output callbacks
                                        step thread                     delivery thread

Callbacks run while the next forward pass computes (the runner releases the GIL). A step that fails ends only the
requests it touched. What it does not cover: tensors and Triton (`triton/`), text (`tokenization/`).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from enginehouse_backends.accounting.energy import EnergySplitter
from enginehouse_backends.engine.blocks import BlockPool
from enginehouse_backends.engine.delivery import Delivery
from enginehouse_backends.engine.generation import Generation
from enginehouse_backends.engine.request import FinishReason, SequenceId, SequenceOutput
from enginehouse_backends.engine.sampler import SequenceSampler
from enginehouse_backends.engine.scheduler import IterationStats, Scheduler, SchedulerConfig
from enginehouse_backends.engine.sequence import Sequence
from enginehouse_backends.engine.words import StopWords, WordMatching, check_words
from enginehouse_backends.speculation.drafting import Drafting
from enginehouse_backends.speculation.ngram import NgramProposer
from enginehouse_contract.errors import EnginehouseError, EngineUnavailableError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

    from enginehouse_backends.engine.generation import OutputCallback
    from enginehouse_backends.engine.request import GenerationRequest, RequestId, TokenIds
    from enginehouse_backends.engine.step import Runner, SequenceSlice, StepPlan
    from enginehouse_backends.tokenization.vocabulary import Vocabulary

    Outputs = list[tuple[OutputCallback, SequenceOutput]]

_LOGGER = logging.getLogger(__name__)
_IDLE_PERIOD_S: Final = 10.0  # an idle engine says so this often, for the machine's books


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine serves; ``scheduler`` holds the step's limits and policy."""

    scheduler: SchedulerConfig
    enable_kv_cache_reuse: bool = True
    max_queue_size: int = 0  # sequences waiting for their first step; 0 = unbounded
    word_matching: WordMatching = "text"
    speculate_ngram: bool = False  # default of requests that do not say


@dataclass(frozen=True, slots=True)
class _Submission:
    request: GenerationRequest
    on_output: OutputCallback
    stream: bool


class Engine:
    """In-flight batching over a runner. Thread-safe; close it (or use it as a context manager) to end its threads.

    Args:
        runner: Computes steps.
        vocabulary: The model's tokens, for stop and bad words.
        config: How to serve.
        energy: Splits the machine's time and energy over sequences (default: time alone).
    """

    def __init__(
        self, runner: Runner, vocabulary: Vocabulary, config: EngineConfig, energy: EnergySplitter | None = None
    ) -> None:
        self.config = config
        self.pool = BlockPool(runner.num_blocks, runner.tokens_per_block, enable_reuse=config.enable_kv_cache_reuse)
        self._runner = runner
        self._vocabulary = vocabulary
        self._energy = energy or EnergySplitter()
        self._scheduler = Scheduler(config.scheduler, self.pool)
        self._drafting = Drafting(config.scheduler.max_num_tokens)
        self._generations: dict[SequenceId, Generation] = {}
        self._sequence_ids: dict[RequestId, list[SequenceId]] = {}
        self._next_sequence_id = 0
        self._inbox: deque[_Submission | RequestId] = deque()  # a bare id cancels
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
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
        check_words(request, self._vocabulary)
        with self._wake:
            self._check_open()
            limit = self.config.max_queue_size
            if limit and len(self._inbox) + self._iteration_stats.num_waiting_sequences >= limit:
                msg = f"the engine's queue is full; limit {limit} sequences (`max_queue_size`). Try again later."
                raise OverloadedError(msg, retry_after_s=1.0)
            self._inbox.append(_Submission(request, on_output, stream))
            self._wake.notify()

    def cancel(self, request_id: RequestId) -> None:
        """End a request in flight as CANCELLED after the running step; unknown ids are ignored."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def iteration_stats(self) -> IterationStats:
        """Return the statistics of the last step."""
        return self._iteration_stats

    def close(self) -> None:
        """Cancel everything, end both threads, and return when they are gone."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._step_thread.join()
        self._delivery.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            msg = f"the engine stopped after an internal error ({type(self._failure).__name__}); reload the model."
            raise EngineUnavailableError(msg)
        if self._closing:
            raise EngineUnavailableError("the engine is shutting down.")

    # ---- step thread ----

    def _run(self) -> None:
        reason, error = FinishReason.CANCELLED, None
        try:
            while self._take_inbox():
                self._drafting.propose(self._generations.values())
                plan = self._scheduler.schedule()
                if plan is not None:
                    self._step(plan)
                self._iteration_stats = self._scheduler.iteration_stats()
        except BaseException as failure:
            _LOGGER.exception("the engine's step thread failed")
            with self._wake:
                self._failure = failure
            reason, error = FinishReason.ERROR, f"the engine stopped after an internal error ({type(failure).__name__})"
        self._end_everything(reason, error)

    def _take_inbox(self) -> bool:
        """Admit and cancel what arrived; wait while there is nothing to do. False when closing."""
        with self._wake:
            if not self._inbox and not self._closing and not self._scheduler.has_work:
                self._scheduler.audit()  # costs nothing while idle; a leak shows here first
                while not self._wake.wait_for(lambda: self._inbox or self._closing, _IDLE_PERIOD_S):
                    self._energy.end_idle()
                self._energy.end_idle()
            if self._closing:
                return False
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            if isinstance(message, _Submission):
                self._admit(message)
            else:
                self._end(list(self._sequence_ids.get(message, ())), FinishReason.CANCELLED)
        return True

    def _admit(self, submission: _Submission) -> None:
        request = submission.request
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        speculates = self.config.speculate_ngram if request.speculate_ngram is None else request.speculate_ngram
        sequence_ids = self._sequence_ids.setdefault(request.request_id, [])
        for index in range(request.num_return_sequences):
            sequence_id = SequenceId(self._next_sequence_id)
            self._next_sequence_id += 1
            generation = Generation(
                sequence=Sequence(sequence_id, request, index),
                sampler=SequenceSampler(
                    request, index, self._vocabulary, seed, word_matching=self.config.word_matching
                ),
                stop_words=StopWords(
                    self._vocabulary, request.stop_words, request.end_id, matching=self.config.word_matching
                ),
                on_output=submission.on_output,
                stream=submission.stream,
                proposer=NgramProposer(request.prompt_token_ids) if speculates else None,
            )
            self._generations[sequence_id] = generation
            sequence_ids.append(sequence_id)
            self._scheduler.add(generation.sequence)

    def _step(self, plan: StepPlan) -> None:
        started_s = time.perf_counter()
        try:
            logits = self._runner.run(plan)
        except Exception as error:  # whatever the runtime raised ends only the requests of this step
            _LOGGER.exception("a forward pass failed")
            self._fail(plan.slices, error)
            return
        self._drafting.observe(plan, time.perf_counter() - started_s)
        sampled: dict[SequenceId, TokenIds] = {}
        row = 0
        for piece in plan.slices:
            generation = self._generations[piece.sequence_id]
            try:
                sampled[piece.sequence_id] = generation.sample(piece, logits, row)
            except Exception as error:  # one sequence's sampling must not end the others
                _LOGGER.exception("sampling failed for request %s", generation.sequence.request.request_id)
                self._fail((piece,), error)
            row += piece.num_logit_rows
        self._scheduler.apply(plan, sampled)
        self._energy.end_step({piece.sequence_id: len(piece.token_ids) for piece in plan.slices})
        self._deliver(sampled)

    def _deliver(self, sampled: dict[SequenceId, TokenIds]) -> None:
        outputs: Outputs = []
        for sequence_id, token_ids in sampled.items():
            generation = self._generations.get(sequence_id)
            if generation is None or not token_ids:
                continue
            if generation.finish_reason is not None:
                outputs.append((generation.on_output, self._remove(generation)))
            elif generation.stream and not self._delivery.is_waiting(*generation.delivery_key):
                outputs.append((generation.on_output, generation.take_output()))
        self._delivery.put(outputs)

    def _remove(self, generation: Generation, error: str | None = None) -> SequenceOutput:
        """Take a sequence out of everything and return its last output."""
        sequence = generation.sequence
        self._scheduler.finish(sequence.sequence_id)
        del self._generations[sequence.sequence_id]
        siblings = self._sequence_ids[sequence.request.request_id]
        siblings.remove(sequence.sequence_id)
        if not siblings:
            del self._sequence_ids[sequence.request.request_id]
        output = generation.take_output(error)
        share = self._energy.take(sequence.sequence_id)
        stats = replace(
            output.stats,
            machine_time_ns=share.machine_ns,
            energy_uj=share.energy_uj if self._energy.tells_energy else None,
            is_energy_estimated=share.is_estimated,
        )
        return replace(output, stats=stats)

    def _fail(self, slices: Iterable[SequenceSlice], error: Exception) -> None:
        text = str(error) if isinstance(error, EnginehouseError) else f"a step failed ({type(error).__name__}: {error})"
        self._end([piece.sequence_id for piece in slices], FinishReason.ERROR, text)

    def _end(self, sequence_ids: list[SequenceId], reason: FinishReason, error: str | None = None) -> None:
        outputs: Outputs = []
        for sequence_id in sequence_ids:
            generation = self._generations[sequence_id]
            generation.finish_reason = reason
            outputs.append((generation.on_output, self._remove(generation, error)))
        self._delivery.put(outputs)

    def _end_everything(self, reason: FinishReason, error: str | None) -> None:
        """Answer everything in flight and everything still in the inbox when the step thread ends."""
        with self._wake:
            self._closing = True
            submissions = [message for message in self._inbox if isinstance(message, _Submission)]
            self._inbox.clear()
        outputs: Outputs = []
        for generation in self._generations.values():
            generation.finish_reason = reason
            outputs.append((generation.on_output, generation.take_output(error)))
        outputs.extend(
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
            for submission in submissions
            for index in range(submission.request.num_return_sequences)
        )
        self._delivery.put(outputs)
