"""The front door's life of a request: admission, one engine call per row in a thread, watching, and one end.

::

    accept -> [fair queue] -> row thread: engine deltas -> text -> responses -> last response
                    ^                          ^
                    |     watcher thread: clients that left, deadlines, silent or dead engines

Every request ends exactly once, whatever happens: the thread of its rows ends it, or, when an engine is dead and its
stream would hang for ever, the watcher does and the thread is left behind. What it does not cover: tensors
(`request.py`), text (`generation.py`), the server (`triton/`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from enginehouse_backends.accounting.meter import NoMeter
from enginehouse_backends.admission.fair_queue import FairQueue, QueueLimits, Ticket
from enginehouse_backends.front_door.engine_client import stop_engine
from enginehouse_contract.errors import (
    DeadlineExceededError,
    EnginehouseError,
    EngineUnavailableError,
    RequestCancelledError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from enginehouse_backends.accounting.meter import MeteredRequest
    from enginehouse_backends.accounting.records import UsageRecord
    from enginehouse_backends.front_door.engine_client import CallEngine
    from enginehouse_backends.front_door.generation import FinishReasonName
    from enginehouse_backends.front_door.request import FrontRow
    from enginehouse_backends.front_door.routes import Route
    from enginehouse_backends.front_door.row_usage import RowUsage

_LOGGER = logging.getLogger(__name__)

_WATCH_PERIOD_S: Final = 0.02
_CHECK_PAUSE_S: Final = 0.003  # a pass over n requests is not repeated before n times this has gone by ...
_MAX_WATCH_PERIOD_S: Final = 0.1  # ... but never later than this: a client that left stops its engine in time
_PING_PERIOD_S: Final = 0.4


class ResponseSink(Protocol):
    """Where a request's responses go; :class:`enginehouse_backends.triton.fence.ResponseStream` is one."""

    @property
    def is_closed(self) -> bool:
        """Whether the final response was sent."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client has left."""
        ...

    def send(self, outputs: dict[str, Any], *, final: bool = False) -> None:
        """Send a response."""
        ...

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        ...


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Limits of one front door instance; times in seconds."""

    queue: QueueLimits
    inter_token_timeout_s: float = 60.0
    default_timeout_s: float | None = None


@dataclass(slots=True)
class Request:
    """A request of one or more rows; the FINAL flag goes with the last response of the last sequence."""

    sink: ResponseSink
    request_id: str
    num_open_sequences: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, outputs: dict[str, Any], *, ends_sequence: bool) -> None:
        """Send one response of one sequence."""
        with self.lock:
            self.num_open_sequences -= ends_sequence
            self.sink.send(outputs, final=self.num_open_sequences == 0)


@dataclass(eq=False, slots=True)
class Job:
    """One row on its way."""

    request: Request
    row: FrontRow
    row_index: int | None  # None where the request has one row
    route: Route
    prompt_token_ids: list[int]
    deadline_s: float | None
    usage: RowUsage
    accounting: MeteredRequest = field(default_factory=NoMeter)
    model_name: str = ""  # as price books know it
    accepted_s: float = field(default_factory=time.monotonic)
    engine_request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    ticket: Ticket[Job] | None = None
    last_activity_s: float = 0.0
    end_reason: FinishReasonName | None = None  # why it must end before the engine ends it
    first_token_s: float | None = None
    finish_reason: FinishReasonName | None = None  # how it ended
    record: UsageRecord | None = None  # of its accounting
    is_over: bool = False

    @property
    def accounting_id(self) -> str:
        """What the ledger knows the row by: the request's id, and which row it is."""
        return self.request.request_id if self.row_index is None else f"{self.request.request_id}#{self.row_index}"

    def settle(self, reason: FinishReasonName) -> UsageRecord | None:
        """End the accounting with what was used so far; the first call counts.

        Raises :class:`LedgerUnavailableError` when the ledger is away and the policy is to refuse.
        """
        self.finish_reason = self.finish_reason or reason
        self.record = self.accounting.settle(self.usage.tokens(), self.finish_reason, share=self.usage.share())
        return self.record


class FrontDoor:
    """Runs rows over an engine; ``run_row`` turns one admitted job into responses, ``on_end`` hears of every end."""

    def __init__(
        self,
        settings: DoorSettings,
        call_engine: CallEngine,
        run_row: Callable[[FrontDoor, Job], None],
        on_end: Callable[[Job], None] = lambda _: None,
    ) -> None:
        self.call_engine = call_engine
        self._on_end = on_end
        self._settings = settings
        self._run_row = run_row
        self._lock = threading.Lock()
        self._queue: FairQueue[Job] = FairQueue(settings.queue)
        self._jobs: set[Job] = set()
        self._closing = threading.Event()
        self._settlers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="front-door-settle")
        self._stoppers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="front-door-stop")
        self._pings: dict[str, float] = {}  # engine model -> when its running ping began
        self._watcher = threading.Thread(target=self._watch, name="front-door-watcher", daemon=True)
        self._watcher.start()

    @property
    def num_active(self) -> int:
        """Rows that are being generated."""
        return self._queue.num_active

    @property
    def num_waiting(self) -> int:
        """Rows that wait for admission."""
        return self._queue.num_waiting

    def accept(self, jobs: list[Job]) -> None:
        """Queue the rows of one request; raise :class:`OverloadedError` and queue none when there is no room."""
        now_s = time.monotonic()
        with self._lock:
            entered: list[Ticket[Job]] = []
            try:
                entered.extend(self._enter(job, now_s) for job in jobs)
            except EnginehouseError:
                for ticket in entered:
                    self._queue.leave(ticket, now_s)
                    self._jobs.discard(ticket.item)
                raise
        self._dispatch()

    def charge_output(self, job: Job, num_tokens: int) -> None:
        """Count generated tokens as their tenant's service, and the engine as alive."""
        job.last_activity_s = time.monotonic()
        if num_tokens and job.first_token_s is None:
            job.first_token_s = job.last_activity_s
        with self._lock:
            self._queue.charge_output(job.row.tenant, num_tokens)

    def stop(self, job: Job, reason: FinishReasonName) -> None:
        """End a job early: its engine call is stopped and its thread finishes it for *reason*."""
        if job.end_reason is None:
            job.end_reason = reason
            self._stoppers.submit(self._stop_engine, job)

    def close(self) -> None:
        """Fail what waits, stop what runs, and end the watcher."""
        self._closing.set()
        self._watcher.join()
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            self._abandon(job, EngineUnavailableError("the server is shutting down."))
            self._stoppers.submit(self._stop_engine, job)
        self._stoppers.shutdown(wait=True)
        self._settlers.shutdown(wait=True)

    def _enter(self, job: Job, now_s: float) -> Ticket[Job]:
        deadline_s = float("inf") if job.deadline_s is None else job.deadline_s
        ticket = Ticket(job, job.row.tenant, job.row.priority, len(job.prompt_token_ids), now_s, deadline_s)
        self._queue.enter(ticket, now_s)
        job.ticket = ticket
        self._jobs.add(job)
        return ticket

    def _dispatch(self) -> None:
        """Start a thread for every job that may start now."""
        while not self._closing.is_set():
            with self._lock:
                ticket = self._queue.admit(time.monotonic())
            if ticket is None:
                return
            ticket.item.last_activity_s = time.monotonic()
            threading.Thread(target=self._run, args=(ticket.item,), name="front-door-row", daemon=True).start()

    def _run(self, job: Job) -> None:
        try:
            self._run_row(self, job)
        except BaseException as error:  # noqa: BLE001 - a request must end, whatever went wrong
            _settle_or_log(job, job.end_reason or _reason_of(error))
            job.request.sink.fail(_error_of_early_end(job) or error)
            self._stop_siblings(job)
        finally:
            self._leave(job)

    def _stop_siblings(self, job: Job) -> None:
        """A failed row ends its whole request, so its other rows need not go on."""
        with self._lock:
            siblings = [other for other in self._jobs if other.request is job.request and other is not job]
        for other in siblings:
            self.stop(other, "error")

    def _leave(self, job: Job) -> None:
        with self._lock:
            if job.is_over or job.ticket is None:
                return
            job.is_over = True
            self._queue.leave(job.ticket, time.monotonic())
            self._jobs.discard(job)
        self._on_end(job)
        self._dispatch()

    def _abandon(self, job: Job, error: EnginehouseError) -> None:
        """End a job whose thread may never return, or that never had one."""
        was_active = job.ticket is not None and job.ticket.is_active
        job.end_reason = job.end_reason or _reason_of(error)
        job.finish_reason = job.finish_reason or job.end_reason
        if was_active:
            self._settlers.submit(_settle_or_log, job, job.end_reason)
        else:
            self._settlers.submit(job.accounting.release, str(error))
        self._leave(job)
        job.request.sink.fail(error)

    def _stop_engine(self, job: Job) -> None:
        try:
            stop_engine(self.call_engine, job.route.engine_model, job.engine_request_id)
        except EnginehouseError as error:
            self._abandon(job, error)
        except Exception:
            _LOGGER.exception("stopping request %s failed", job.engine_request_id)

    # ---- watcher thread ----

    def _watch(self) -> None:
        next_ping_s = 0.0
        while True:
            with self._lock:
                jobs = list(self._jobs)
            if self._closing.wait(min(_MAX_WATCH_PERIOD_S, max(_WATCH_PERIOD_S, len(jobs) * _CHECK_PAUSE_S))):
                return
            now_s = time.monotonic()
            for job in jobs:
                self._check(job, now_s)
            if now_s >= next_ping_s:
                next_ping_s = now_s + _PING_PERIOD_S
                self._ping({job.route.engine_model for job in jobs if job.ticket is not None and job.ticket.is_active})

    def _check(self, job: Job, now_s: float) -> None:
        if job.is_over:
            return
        is_active = job.ticket is not None and job.ticket.is_active
        if job.request.sink.is_cancelled():
            self._end_early(job, "cancelled", RequestCancelledError("the client left."), is_active=is_active)
        elif job.deadline_s is not None and now_s >= job.deadline_s:
            error = DeadlineExceededError("the request's `timeout_ms` passed while it waited to start.")
            self._end_early(job, "timeout", error, is_active=is_active)
        elif is_active and now_s - job.last_activity_s > self._settings.inter_token_timeout_s:
            silence_s = self._settings.inter_token_timeout_s
            self._abandon(job, EngineUnavailableError(f"the engine was silent for {silence_s:g} s; giving up."))
            self._stoppers.submit(self._stop_engine, job)

    def _end_early(
        self, job: Job, reason: FinishReasonName, error_if_waiting: EnginehouseError, *, is_active: bool
    ) -> None:
        if is_active:
            self.stop(job, reason)
        else:
            self._abandon(job, error_if_waiting)

    def _ping(self, engine_models: Iterable[str]) -> None:
        for model in engine_models:
            with self._lock:
                if model in self._pings:
                    continue
                self._pings[model] = time.monotonic()
            threading.Thread(target=self._ping_one, args=(model,), name="front-door-ping", daemon=True).start()

    def _ping_one(self, engine_model: str) -> None:
        """Ask an engine for a sign of life; when it is gone, end every stream that would hang on it."""
        try:
            stop_engine(self.call_engine, engine_model, f"liveness-{next(_PING_NUMBERS)}")
        except EnginehouseError as error:
            with self._lock:
                jobs = [job for job in self._jobs if job.route.engine_model == engine_model]
            for job in jobs:
                if job.ticket is not None and job.ticket.is_active:
                    self._abandon(job, EngineUnavailableError(f"the engine `{engine_model}` died: {error}"))
        finally:
            with self._lock:
                del self._pings[engine_model]


_PING_NUMBERS = itertools.count()


def _settle_or_log(job: Job, reason: FinishReasonName) -> None:
    try:
        job.settle(reason)
    except EnginehouseError as error:
        _LOGGER.warning("request %s: %s", job.request.request_id, error)


def _reason_of(error: BaseException) -> FinishReasonName:
    if isinstance(error, RequestCancelledError):
        return "cancelled"
    return "timeout" if isinstance(error, DeadlineExceededError) else "error"


def _error_of_early_end(job: Job) -> EnginehouseError | None:
    if job.end_reason == "timeout":
        return DeadlineExceededError("the request's `timeout_ms` passed before its first token.")
    if job.end_reason == "cancelled":
        return RequestCancelledError("the client left.")
    return None
