"""The engine's loop over a fake runner: delivery, cancellation, failures, shutdown."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.engines import make_request

from enginehouse_backends.engine.delivery import Delivery, merge_outputs
from enginehouse_backends.engine.engine import Engine, EngineConfig
from enginehouse_backends.engine.request import FinishReason, RequestId, SequenceOutput
from enginehouse_backends.engine.scheduler import SchedulerConfig
from enginehouse_backends.tokenization.vocabulary import Vocabulary
from enginehouse_contract.errors import EngineUnavailableError, InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from enginehouse_backends.engine.step import StepPlan

VOCAB_SIZE = 64
VOCABULARY = Vocabulary([f"<{i}>".encode() for i in range(VOCAB_SIZE)], frozenset(), is_byte_level=True)


class FakeLogits:
    """Greedy rows: the token after n is n + 1."""

    def __init__(self, last_ids: list[int]) -> None:
        rows = len(last_ids)
        self._rows = np.zeros((rows, VOCAB_SIZE), np.float32)
        for row, token in enumerate(last_ids):
            self._rows[row, (token + 1) % VOCAB_SIZE] = 10.0
        order = np.argsort(-self._rows, axis=1, kind="stable")[:, :8]
        self.top_ids = order.astype(np.int32)
        self.top_values = np.take_along_axis(self._rows, order, axis=1)
        self.log_sum_exp = np.log(np.exp(self._rows).sum(axis=1))

    def full_row(self, row: int) -> np.ndarray:
        return self._rows[row].copy()


class FakeRunner:
    """Computes nothing; ``hold`` stops it inside a step, ``poison`` makes steps with that token fail."""

    num_blocks = 64
    tokens_per_block = 8
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.poison: int | None = None
        self.num_steps = 0

    def run(self, plan: StepPlan) -> FakeLogits:
        self.hold.wait(10)
        self.num_steps += 1
        if any(self.poison in piece.token_ids for piece in plan.slices):
            raise RuntimeError("the runtime broke")
        rows = []
        for piece in plan.slices:
            rows += list(piece.token_ids[len(piece.token_ids) - piece.num_logit_rows :])
        return FakeLogits(rows)


class Receiver:
    """Collects a request's outputs."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.ended = threading.Event()

    def __call__(self, output: SequenceOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


@pytest.fixture
def runner() -> FakeRunner:
    """A fresh fake runner."""
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[Engine]:
    """An engine over the fake runner."""
    config = EngineConfig(SchedulerConfig(max_num_tokens=32, max_batch_size=4, max_seq_len=128), max_queue_size=8)
    with Engine(runner, VOCABULARY, config) as engine:
        yield engine
        runner.hold.set()


def submit(engine: Engine, name: str, prompt: list[int], max_new_tokens: int, **fields: Any) -> Receiver:
    """Submit a streaming request and return its receiver."""
    receiver = Receiver()
    stream = fields.pop("stream", True)
    engine.submit(make_request(name, prompt, max_new_tokens, **fields), receiver, stream=stream)
    return receiver


def test_a_stream_delivers_every_token_once_and_in_order(engine: Engine) -> None:
    """Tokens arrive in order however they are merged, the last output has the reason and the counts."""
    receiver = submit(engine, "r", [1, 2, 3], 20)

    assert receiver.ended.wait(10)
    assert receiver.token_ids == list(range(4, 24))
    last = receiver.outputs[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.stats.num_prompt_tokens, last.stats.num_output_tokens) == (3, 20)


def test_without_streaming_one_output_holds_everything(engine: Engine) -> None:
    """A request that does not stream is answered once per sequence."""
    receiver = submit(engine, "r", [1], 10, stream=False)

    assert receiver.ended.wait(10)
    assert len(receiver.outputs) == 1
    assert receiver.token_ids == list(range(2, 12))


def test_end_ids_and_stop_words_end_a_sequence(engine: Engine) -> None:
    """The end id and a stop word's last token are delivered, with the word that matched."""
    by_end = submit(engine, "end", [1], 30, end_id=5)
    by_word = submit(engine, "word", [1], 30, stop_words=((7, 8),))

    assert by_end.ended.wait(10)
    assert by_word.ended.wait(10)
    assert (by_end.token_ids, by_end.outputs[-1].stop_word) == ([2, 3, 4, 5], (5,))
    assert (by_word.token_ids[-1], by_word.outputs[-1].stop_word) == (8, (7, 8))
    assert by_word.outputs[-1].finish_reason is FinishReason.STOP


def test_cancelling_ends_a_request_after_the_running_step(engine: Engine, runner: FakeRunner) -> None:
    """A cancelled request gets one last output; its blocks are free again; unknown ids are ignored."""
    runner.hold.clear()
    receiver = submit(engine, "r", [1], 100)
    engine.cancel(RequestId("r"))
    engine.cancel(RequestId("nobody"))
    runner.hold.set()

    assert receiver.ended.wait(10)
    assert receiver.outputs[-1].finish_reason is FinishReason.CANCELLED
    assert engine.pool.num_used_blocks == 0


def test_a_failing_step_ends_only_the_requests_in_it(engine: Engine, runner: FakeRunner) -> None:
    """The requests of a failed pass get an error that says why; later ones are served."""
    runner.poison = 40
    receiver = submit(engine, "bad", [40], 5)

    assert receiver.ended.wait(10)
    assert receiver.outputs[-1].finish_reason is FinishReason.ERROR
    assert "the runtime broke" in str(receiver.outputs[-1].error)
    assert submit(engine, "good", [1], 5).ended.wait(10)


def test_a_receiver_that_fails_loses_its_request_and_no_other(engine: Engine) -> None:
    """An exception in a receiver cancels that request."""

    def broken(output: SequenceOutput) -> None:
        raise ValueError(output.request_id)

    engine.submit(make_request("broken", [1], 100), broken)
    other = submit(engine, "other", [1], 30)

    assert other.ended.wait(10)
    assert other.token_ids == list(range(2, 32))


def test_requests_that_never_fit_are_refused_at_once(engine: Engine) -> None:
    """A request beyond the limits raises where it is submitted."""
    with pytest.raises(InvalidRequestError, match="request_output_len"):
        submit(engine, "r", [1], 128)


def test_a_full_queue_is_refused(engine: Engine, runner: FakeRunner) -> None:
    """Beyond max_queue_size waiting sequences a request is refused with a hint."""
    runner.hold.clear()
    submit(engine, "running", [1], 4)
    time.sleep(0.05)  # its step has begun and holds
    for index in range(8):
        submit(engine, f"r{index}", [1], 4)
    with pytest.raises(OverloadedError, match="max_queue_size") as caught:
        submit(engine, "one too many", [1], 4)
    runner.hold.set()

    assert caught.value.retry_after_s


def test_closing_answers_everybody(runner: FakeRunner) -> None:
    """Requests in flight and in the queue are ended as cancelled, and later ones are refused."""
    config = EngineConfig(SchedulerConfig(max_num_tokens=32, max_batch_size=2, max_seq_len=128))
    engine = Engine(runner, VOCABULARY, config)
    receivers = [submit(engine, f"r{index}", [1], 100) for index in range(6)]
    engine.close()

    assert all(receiver.ended.is_set() for receiver in receivers)
    with pytest.raises(EngineUnavailableError):
        submit(engine, "late", [1], 4)


def test_drafts_change_steps_and_not_tokens(runner: FakeRunner) -> None:
    """With prompt lookup on, repeated text takes fewer steps and is the same."""
    config = EngineConfig(SchedulerConfig(max_num_tokens=64, max_batch_size=4, max_seq_len=256), speculate_ngram=True)
    prompt = [*range(10, 40), *range(10, 14)]
    with Engine(runner, VOCABULARY, config) as engine:
        receiver = submit(engine, "r", prompt, 26)
        assert receiver.ended.wait(10)

    assert receiver.token_ids == list(range(14, 40))
    assert receiver.outputs[-1].stats.num_accepted_draft_tokens > 5
    assert runner.num_steps < 20


def test_external_drafts_are_verified(engine: Engine) -> None:
    """Drafts that came with the request are accepted up to the first wrong one, and one more token follows."""
    receiver = submit(engine, "r", [1, 2], 6, draft_token_ids=(3, 4, 9, 10))

    assert receiver.ended.wait(10)
    assert receiver.token_ids == [3, 4, 5, 6, 7, 8]
    assert receiver.outputs[-1].stats.num_draft_tokens == 4
    assert receiver.outputs[-1].stats.num_accepted_draft_tokens == 2


def test_delivery_merges_what_waits_for_a_slow_receiver() -> None:
    """While a receiver is busy, its sequence's outputs become one; another's are not held up or reordered."""
    seen: dict[str, list[tuple[int, ...]]] = {"slow": [], "fast": []}
    release = threading.Event()

    def slow(output: SequenceOutput) -> None:
        release.wait(5)
        seen["slow"].append(output.token_ids)

    def fast(output: SequenceOutput) -> None:
        seen["fast"].append(output.token_ids)

    def output(name: str, token: int) -> SequenceOutput:
        return SequenceOutput(request_id=RequestId(name), sequence_index=0, token_ids=(token,))

    delivery = Delivery(lambda _: None)
    delivery.put([(slow, output("slow", 0))])
    time.sleep(0.05)
    for token in range(1, 5):
        delivery.put([(slow, output("slow", token)), (fast, output("fast", token))])
    release.set()
    delivery.close()

    assert seen["slow"] == [(0,), (1, 2, 3, 4)]
    assert [token for tokens in seen["fast"] for token in tokens] == [1, 2, 3, 4]


def test_merged_outputs_say_what_both_said() -> None:
    """Tokens, log probabilities and logits are joined; the end is the later one's."""
    earlier = SequenceOutput(
        request_id=RequestId("r"),
        sequence_index=0,
        token_ids=(1,),
        log_probs=(-0.1,),
        generation_logits=np.ones((1, 3), np.float32),
    )
    later = SequenceOutput(
        request_id=RequestId("r"),
        sequence_index=0,
        token_ids=(2, 3),
        log_probs=(-0.2, -0.3),
        finish_reason=FinishReason.STOP,
        generation_logits=np.zeros((2, 3), np.float32),
    )
    merged = merge_outputs(earlier, later)

    assert merged.token_ids == (1, 2, 3)
    assert merged.log_probs == (-0.1, -0.2, -0.3)
    assert merged.finish_reason is FinishReason.STOP
    assert merged.generation_logits is not None
    assert merged.generation_logits.shape == (3, 3)
