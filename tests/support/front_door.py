"""A scripted engine for the front door, and a sink that records its responses."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_backends.front_door.door import Job, Request
from enginehouse_backends.front_door.request import parse_front_request
from enginehouse_backends.front_door.routes import Route
from enginehouse_backends.front_door.row_usage import RowUsage
from enginehouse_contract.errors import EngineUnavailableError, RequestCancelledError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from enginehouse_backends.accounting.meter import Meter
    from enginehouse_backends.front_door.door import FrontDoor

END_ID = 256
ROUTE = Route("r1", "engine", "unused", "unused", "sha256:build")


def tokens_of(text: str) -> list[int]:
    """Return the token ids of *text*, one a byte."""
    return list(text.encode())


@dataclass
class FakeEngine:
    """Answers a call with scripted tokens per sequence, one response each, as our engine's contract says.

    ``gate`` holds back every response after the first ``num_free`` until it is set.
    """

    sequences: list[list[int]]
    gate: threading.Event = field(default_factory=threading.Event)
    num_free: int = 10**9
    is_dead: bool = False
    error: Exception | None = None
    calls: list[tuple[str, dict[str, NDArray[Any]], str]] = field(default_factory=list)
    stopped_ids: list[str] = field(default_factory=list)

    def __call__(
        self,
        model_name: str,
        inputs: Mapping[str, NDArray[Any]],
        requested_outputs: Sequence[str],
        *,
        request_id: str,
        parameters: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, NDArray[Any]]]:
        if self.is_dead:
            raise EngineUnavailableError("Stub process is not healthy.")
        if "stop" in inputs:
            self.stopped_ids.append(request_id)
            return
        self.calls.append((model_name, dict(inputs), request_id))
        if self.error is not None:
            raise self.error
        for index, tokens in enumerate(self.sequences):
            for position, token_id in enumerate(tokens):
                if position >= self.num_free:
                    yield from self._wait(request_id)
                is_last = position == len(tokens) - 1
                yield self._response(index, [token_id], is_last=is_last)

    def _wait(self, request_id: str) -> Iterator[dict[str, NDArray[Any]]]:
        while not self.gate.wait(0.005):
            if request_id in self.stopped_ids:
                raise RequestCancelledError("the request was cancelled")
        yield from ()

    def _response(self, index: int, token_ids: list[int], *, is_last: bool) -> dict[str, NDArray[Any]]:
        response: dict[str, NDArray[Any]] = {
            "output_ids": np.array([[token_ids]], np.int32),
            "sequence_length": np.array([[len(token_ids)]], np.int32),
            "output_log_probs": np.array([[[-0.5] * len(token_ids)]], np.float32),
            "cum_log_probs": np.array([[-0.5]], np.float32),
        }
        if len(self.sequences) > 1:
            response["sequence_index"] = np.array([[index]], np.int32)
        if is_last:
            response["kv_cache_reused_blocks"] = np.array([[1]], np.int32)
            response["total_draft_tokens"] = np.array([[0]], np.int32)
        return response


@dataclass
class RecordingSink:
    """Keeps every response; ``leave`` is the client going away."""

    responses: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = None
    is_closed: bool = False
    has_left: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def is_cancelled(self) -> bool:
        return self.has_left and not self.is_closed

    def send(self, outputs: dict[str, Any], *, final: bool = False) -> None:
        if not self.is_closed:
            self.responses.append(outputs)
            self._close(final=final)

    def fail(self, error: BaseException) -> None:
        if not self.is_closed:
            self.error = error
            self._close(final=True)

    def _close(self, *, final: bool) -> None:
        self.is_closed = final
        if final:
            self.ended.set()

    def text(self, sequence_index: int = 0) -> str:
        """Return the joined text of one sequence."""
        return "".join(
            response["text_output"][0, 0].decode()
            for response in self.responses
            if int(response.get("sequence_index", np.zeros((1, 1)))[0, 0]) == sequence_index
        )

    def finish_reasons(self) -> list[str]:
        """Return the finish reasons in the order they came."""
        return [r["finish_reason"][0, 0].decode() for r in self.responses if "finish_reason" in r]


def ask(
    door: FrontDoor,
    *,
    deadline_s: float | None = None,
    rows: int = 1,
    meter: Meter | None = None,
    request_id: str = "id-1",
    **inputs: Any,
) -> RecordingSink:
    """Send a request of equal rows, accounted for by *meter*, and return its sink."""
    values: dict[str, Any] = {"text_input": "hi", "max_tokens": 100, "stream": True, **inputs}
    arrays = {name: _array(value, rows) for name, value in values.items()}
    parsed = parse_front_request(arrays, {})
    sink = RecordingSink()
    request = Request(sink, request_id, sum(row.num_sequences for row in parsed))
    jobs = []
    for index, row in enumerate(parsed):
        prompt = tokens_of(row.text or "")
        usage = RowUsage(len(prompt), row.num_sequences)
        jobs.append(Job(request, row, index if rows > 1 else None, ROUTE, prompt, deadline_s, usage))
        if meter is not None:
            jobs[-1].accounting = meter.open(
                tenant=row.tenant,
                request_id=jobs[-1].accounting_id,
                model="small",
                build_id=ROUTE.build_id,
                upper_bound=usage.upper_bound(row.max_tokens),
            )
    door.accept(jobs)
    return sink


def _array(value: Any, rows: int) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str):
        return np.array([[item.encode() for item in values]] * rows, np.object_)
    return np.array([values] * rows)


def wait_until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait for a condition that another thread brings about."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.005)
