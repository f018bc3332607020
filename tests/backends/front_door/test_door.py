"""The front door's life of a request over a scripted engine: text, ends, cancellation, deadlines, death."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from tests.support.front_door import END_ID, FakeEngine, ask, tokens_of, wait_until

from enginehouse_backends.admission.fair_queue import QueueLimits
from enginehouse_backends.front_door.door import DoorSettings, FrontDoor, Job
from enginehouse_backends.front_door.engine_client import generate, prompt_inputs
from enginehouse_backends.front_door.routes import Route
from enginehouse_backends.front_door.row_runner import RowRunner, TextOptions
from enginehouse_contract.errors import (
    DeadlineExceededError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from enginehouse_backends.tokenization.vocabulary import Vocabulary

ROUTE = Route("r1", "engine", "unused", "unused", "sha256:build")


def test_a_stream_ends_with_its_reason_and_usage(open_door: Callable[..., FrontDoor]) -> None:
    """Deltas join to the text; the last response has the finish reason, exact counts, request and build id."""
    door = open_door(FakeEngine([[*tokens_of("héllo 🎉"), END_ID]]))
    sink = ask(door)

    assert sink.ended.wait(5)
    assert sink.text() == "héllo 🎉"
    last = sink.responses[-1]
    assert last["finish_reason"][0, 0] == b"stop"
    assert last["num_output_tokens"].tolist() == [[12]]
    assert last["num_input_tokens"].tolist() == [[2]]
    assert last["num_cached_input_tokens"].tolist() == [[2]]
    assert last["request_id"][0, 0] == b"id-1"
    assert last["build_id"][0, 0] == b"sha256:build"
    assert all("\ufffd" not in response["text_output"][0, 0].decode() for response in sink.responses)


def test_length_is_reported_as_such(open_door: Callable[..., FrontDoor]) -> None:
    """A sequence that reached max_tokens finishes with `length`."""
    door = open_door(FakeEngine([tokens_of("abc")]))
    sink = ask(door, max_tokens=3)

    assert sink.ended.wait(5)
    assert sink.finish_reasons() == ["length"]


def test_without_streaming_one_response_holds_prompt_and_text(open_door: Callable[..., FrontDoor]) -> None:
    """A request that does not stream answers once, with the prompt unless it is excluded."""
    door = open_door(FakeEngine([[*tokens_of(" there"), END_ID]]))
    with_prompt, without = ask(door, stream=False), ask(door, stream=False, exclude_input_in_output=True)

    assert with_prompt.ended.wait(5)
    assert without.ended.wait(5)
    assert [len(with_prompt.responses), len(without.responses)] == [1, 1]
    assert (with_prompt.text(), without.text()) == ("hi there", " there")


def test_a_stop_string_ends_the_text_and_the_engine(open_door: Callable[..., FrontDoor]) -> None:
    """No part of the stop string is sent, the engine is told to stop, and the reason names the string."""
    engine = FakeEngine([tokens_of("one two STOP three four")], num_free=14)
    door = open_door(engine)
    sink = ask(door, stop_words=["nothing", "STOP"])

    assert sink.ended.wait(5)
    assert sink.text() == "one two "
    assert sink.finish_reasons() == ["stop"]
    assert sink.responses[-1]["stop_reason"][0, 0] == b"STOP"
    assert len(engine.stopped_ids) == 1


def test_sequences_of_a_request_end_each_on_its_own(open_door: Callable[..., FrontDoor]) -> None:
    """N sequences are told apart by sequence_index, each with its own end; FINAL goes with the last."""
    door = open_door(FakeEngine([[*tokens_of("first"), END_ID], [*tokens_of("second"), END_ID]]))
    sink = ask(door, num_return_sequences=2)

    assert sink.ended.wait(5)
    assert (sink.text(0), sink.text(1)) == ("first", "second")
    assert sink.finish_reasons() == ["stop", "stop"]


def test_rows_of_a_batch_are_told_apart(open_door: Callable[..., FrontDoor]) -> None:
    """Each row of a batched request answers under its batch_index."""
    door = open_door(FakeEngine([[*tokens_of("x"), END_ID]]))
    sink = ask(door, rows=3)

    assert sink.ended.wait(5)
    assert sorted(int(r["batch_index"][0, 0]) for r in sink.responses if "finish_reason" in r) == [0, 1, 2]


def test_log_probs_follow_the_tokens(open_door: Callable[..., FrontDoor]) -> None:
    """Every token's log probability is sent once."""
    door = open_door(FakeEngine([[*tokens_of("é!"), END_ID]]))
    sink = ask(door, return_log_probs=True)

    assert sink.ended.wait(5)
    assert sum(response["output_log_probs"].size for response in sink.responses) == 4


def test_perf_metrics_come_only_when_asked_for(open_door: Callable[..., FrontDoor]) -> None:
    """The engine's metrics are handed on with the last response of a request that wants them."""
    door = open_door(FakeEngine([[*tokens_of("x"), END_ID]]))
    plain, asked = ask(door), ask(door, return_perf_metrics=True)

    assert plain.ended.wait(5)
    assert asked.ended.wait(5)
    assert "kv_cache_reused_blocks" not in plain.responses[-1]
    assert asked.responses[-1]["kv_cache_reused_blocks"].tolist() == [[1]]


def test_a_client_that_leaves_stops_the_engine(open_door: Callable[..., FrontDoor]) -> None:
    """A cancelled request's engine call is stopped and its place is given to the next."""
    engine = FakeEngine([tokens_of("never ending")], num_free=3)
    door = open_door(engine, max_active=1)
    sink = ask(door)
    wait_until(lambda: len(sink.responses) == 3)
    sink.has_left = True

    assert sink.ended.wait(5)
    assert isinstance(sink.error, RequestCancelledError)
    assert len(engine.stopped_ids) == 1
    wait_until(lambda: door.num_active == 0)


def test_a_timeout_answers_with_the_text_so_far(open_door: Callable[..., FrontDoor]) -> None:
    """Past its deadline a running request ends with reason `timeout` and keeps what was generated."""
    door = open_door(FakeEngine([tokens_of("slow answer")], num_free=4))
    sink = ask(door, deadline_s=0.0)

    assert sink.ended.wait(5)
    if sink.error is None:
        assert sink.finish_reasons() == ["timeout"]
        assert sink.text() == "slow"
    else:
        assert isinstance(sink.error, DeadlineExceededError)


def test_a_waiting_request_times_out_with_an_error(open_door: Callable[..., FrontDoor]) -> None:
    """A request whose deadline passes in the queue is refused and leaves the queue."""
    door = open_door(FakeEngine([tokens_of("busy")], num_free=1), max_active=1)
    busy = ask(door)
    wait_until(lambda: busy.responses)
    waiting = ask(door, deadline_s=0.0)

    assert waiting.ended.wait(5)
    assert isinstance(waiting.error, DeadlineExceededError)
    assert door.num_waiting == 0


def test_overload_is_refused_at_once(open_door: Callable[..., FrontDoor]) -> None:
    """Beyond the queue's bound a request is refused, and the others are served."""
    engine = FakeEngine([[*tokens_of("ok"), END_ID]], num_free=1)
    door = open_door(engine, max_active=1, max_waiting=1)
    first, second = ask(door), ask(door)
    with pytest.raises(OverloadedError, match="the server is full"):
        ask(door)
    engine.gate.set()

    assert first.ended.wait(5)
    assert second.ended.wait(5)
    assert (first.text(), second.text()) == ("ok", "ok")


def test_a_batch_that_does_not_fit_enters_with_no_row(open_door: Callable[..., FrontDoor]) -> None:
    """When one row of a batch finds no room, none is queued."""
    door = open_door(FakeEngine([tokens_of("x")], num_free=0), max_active=1, max_waiting=2)
    ask(door)
    wait_until(lambda: door.num_active == 1)
    with pytest.raises(OverloadedError):
        ask(door, rows=3)

    assert door.num_waiting == 0


def test_the_engines_refusal_reaches_the_client(open_door: Callable[..., FrontDoor]) -> None:
    """An error of the engine ends the request with that error."""
    door = open_door(FakeEngine([[]], error=InvalidRequestError("`runtime_top_p` must lie in (0, 1]")))
    sink = ask(door)

    assert sink.ended.wait(5)
    assert isinstance(sink.error, InvalidRequestError)


def test_a_dead_engine_fails_its_streams_in_time(open_door: Callable[..., FrontDoor]) -> None:
    """Streams that hang on an engine that died are failed by the watcher, and the door serves on."""
    engine = FakeEngine([[*tokens_of("hang"), END_ID]], num_free=1)
    door = open_door(engine)
    sink = ask(door)
    wait_until(lambda: sink.responses)
    engine.is_dead = True

    assert sink.ended.wait(2)
    assert isinstance(sink.error, EngineUnavailableError)
    engine.is_dead = False
    engine.gate.set()
    again = ask(door)
    assert again.ended.wait(5)
    assert again.text() == "hang"


def test_a_silent_engine_is_given_up(open_door: Callable[..., FrontDoor]) -> None:
    """An engine that lives but sends nothing for the inter-token limit loses the request."""
    door = open_door(FakeEngine([tokens_of("ab")], num_free=1), inter_token_timeout_s=0.2)
    sink = ask(door)

    assert sink.ended.wait(5)
    assert isinstance(sink.error, EngineUnavailableError)
    assert "silent" in str(sink.error)


def test_closing_the_door_ends_everything(byte_vocabulary: Vocabulary) -> None:
    """On shutdown running and waiting requests are failed, not left hanging."""
    engine = FakeEngine([tokens_of("endless")], num_free=0)
    started = threading.Event()

    def run_row(door: FrontDoor, job: Job) -> None:
        started.set()
        inputs = prompt_inputs(job.prompt_token_ids, job.row.max_tokens)
        deltas = generate(door.call_engine, "engine", inputs, request_id=job.engine_request_id, parameters={})
        RowRunner(job, byte_vocabulary, TextOptions(), END_ID).run(door, deltas)

    door = FrontDoor(DoorSettings(QueueLimits(max_active=1, max_waiting=4)), engine, run_row)
    running, waiting = ask(door), ask(door)
    started.wait(5)
    door.close()

    for sink in (running, waiting):
        assert sink.ended.wait(5)
        assert isinstance(sink.error, EngineUnavailableError)
