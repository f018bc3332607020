"""Sends a workload to a server and records what comes back: the impure half of `enginehouse bench`."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginehouse_builders.bench.records import RequestRecord
from enginehouse_builders.bench.run import GeneratorLoad
from enginehouse_builders.bench.workload import PlannedRequest, Workload, plan_requests
from enginehouse_client import AsyncClient
from enginehouse_contract.errors import EnginehouseError, ServerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from enginehouse_client import GenerationChunk

    Progress = Callable[[str, float], None]


@dataclass(slots=True)
class LoadDriver:
    """Runs one workload against one model; made for one use.

    Args:
        client: Makes no retries: a refused request is a result, too.
        options: Options of every request, as :class:`enginehouse_client.GenerationOptions`.
        progress: Told a stage and a fraction as requests end.
    """

    client: AsyncClient
    workload: Workload
    model: str
    options: dict[str, Any]
    timeout_s: float
    progress: Progress
    _records: list[RequestRecord] = field(default_factory=list)
    _started_s: float = 0.0
    _first_measured_s: float | None = None

    async def run(self) -> tuple[tuple[RequestRecord, ...], GeneratorLoad]:
        """Send everything, wait for every answer, and return the records by index and the generator's own load."""
        requests = plan_requests(self.workload)
        self._started_s = time.perf_counter()
        loop_cpu_s, process_cpu_s = time.thread_time(), time.process_time()
        await (self._open_loop(requests) if self.workload.loop == "open" else self._closed_loop(requests))
        load = GeneratorLoad(self._now_s(), time.thread_time() - loop_cpu_s, time.process_time() - process_cpu_s)
        return tuple(sorted(self._records, key=lambda record: record.index)), load

    async def _open_loop(self, requests: Iterator[PlannedRequest]) -> None:
        async with _TaskGroup() as tasks:
            for request in requests:
                assert request.at_s is not None, "the open loop's requests have times"
                delay_s = request.at_s - self._now_s()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                tasks.start(self._send(request, request.at_s))

    async def _closed_loop(self, requests: Iterator[PlannedRequest]) -> None:
        assert self.workload.concurrency is not None, "the closed loop has a concurrency"

        async def keep_one_in_flight() -> None:
            for request in requests:  # shared: each takes the next
                now_s = self._now_s()
                if self._is_over(now_s):
                    return
                if not request.is_warmup and self._first_measured_s is None:
                    self._first_measured_s = now_s
                await self._send(request, now_s)

        async with _TaskGroup() as tasks:
            for _ in range(self.workload.concurrency):
                tasks.start(keep_one_in_flight())

    def _is_over(self, now_s: float) -> bool:
        duration_s = self.workload.duration_s
        return (
            duration_s is not None
            and self._first_measured_s is not None
            and now_s > self._first_measured_s + duration_s
        )

    async def _send(self, request: PlannedRequest, intended_at_s: float) -> None:
        sent_at_s = self._now_s()
        piece_at_s: list[float] = []
        last: GenerationChunk | None = None
        counts: list[int] = []
        error: EnginehouseError | None = None
        is_cancelled = False
        stream = self.client.generate_stream(
            request.prompt,
            model=self.model,
            timeout_s=self.timeout_s,
            max_tokens=request.max_tokens,
            tenant=request.tenant,
            priority=request.priority,
            **self.options,
        )
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    last = chunk
                    if chunk.text:
                        piece_at_s.append(self._now_s())
                    if chunk.usage.num_output_tokens is not None:
                        counts.append(chunk.usage.num_output_tokens)
                    if request.cancel_after_pieces is not None and len(piece_at_s) >= request.cancel_after_pieces:
                        is_cancelled = chunk.finish_reason is None
                        if is_cancelled:
                            break
        except EnginehouseError as caught:
            error = caught
        self._records.append(
            RequestRecord(
                request.index,
                intended_at_s,
                sent_at_s,
                self._now_s(),
                tuple(piece_at_s),
                is_warmup=request.is_warmup,
                is_cancelled=is_cancelled,
                error_kind=None if error is None else type(error).__name__,
                error=None if error is None else str(error),
                num_output_tokens=sum(counts) if counts else None,
                tenant=request.tenant,
                **({} if last is None else _told_at_the_end(last)),
            )
        )
        self._report_progress()

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s

    def _report_progress(self) -> None:
        done = len(self._records) - self.workload.num_warmup_requests
        if self.workload.duration_s is not None:
            fraction = self._now_s() / self.workload.duration_s
        else:
            fraction = done / (self.workload.num_measured_requests or 1)
        self.progress("warming up" if done <= 0 else "measuring", fraction)


def _told_at_the_end(chunk: GenerationChunk) -> dict[str, Any]:
    return {
        "finish_reason": chunk.finish_reason,
        "num_input_tokens": chunk.usage.num_input_tokens,
        "num_cached_input_tokens": chunk.usage.num_cached_input_tokens,
        "cost": None if chunk.cost is None else chunk.cost.amount,
        "currency": None if chunk.cost is None else chunk.cost.currency,
        "energy_joules": None if chunk.energy is None else chunk.energy.joules,
        "is_energy_estimated": None if chunk.energy is None else chunk.energy.is_estimated,
        "build_id": chunk.build_id,
    }


class _TaskGroup:
    """Waits for its tasks; if the block or a task fails, the others are cancelled (Python 3.10 has none)."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            while self._tasks and error is None and self._failure is None:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure is not None and error is None:
            raise self._failure

    def start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()


async def run_load(
    url: str, workload: Workload, *, model: str, options: dict[str, Any], timeout_s: float, progress: Progress
) -> tuple[tuple[RequestRecord, ...], GeneratorLoad]:
    """Run a workload against a server.

    Raises :class:`ServerUnreachableError` where the server, or the model, does not answer, before anything is sent.
    """
    async with AsyncClient(url, max_retries=0) as client:
        if not await client.server_ready():
            raise ServerUnreachableError(f"no server answers at {url}; start one with `enginehouse serve`.")
        if not await client.model_ready(model):
            raise ServerUnreachableError(f"the server at {url} has no model `{model}` that is ready; see --model.")
        return await LoadDriver(client, workload, model, options, timeout_s, progress).run()
