"""A steady load whose every answer is known: short requests at a rate beside long streams, over two builds.

Each build answers each prompt with its own text, learnt before. An answer that names one build and has another's text
is mixed; so is one whose pieces name two.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginehouse_client import AsyncClient, Client
from enginehouse_contract.errors import EnginehouseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

NUM_SHORT_TOKENS = 4
NUM_LONG_TOKENS = 80
SHORT_PROMPTS = ("Once upon a time", "The weather today is", "My favourite book is", "To bake bread you")
LONG_PROMPTS = (
    "Write a story about a fox.",
    "Explain how rain forms.",
    "Describe a city by the sea.",
    "List some animals.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; times in seconds of ``time.perf_counter``."""

    request_id: str
    is_long: bool
    sent_s: float
    first_s: float | None
    end_s: float
    build_ids: frozenset[str]
    text: str
    error: str = ""


@dataclass
class SteadyLoad:
    """Short requests at ``rate_per_s`` and ``num_streams`` long ones, in a thread of its own; a context manager."""

    grpc_url: str
    expected: Mapping[tuple[str, str], str]  # (build id, prompt) -> text
    rate_per_s: float = 20.0
    num_streams: int = 8
    answers: list[Answer] = field(default_factory=list)
    mixed: list[Answer] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="steady-load")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join()

    @property
    def failed(self) -> list[Answer]:
        """Requests that did not end as they should."""
        return [answer for answer in self.answers if answer.error]

    def short_latencies_s(self, start_s: float, end_s: float) -> list[float]:
        """Return the latencies of the short requests sent in a span of time."""
        return [a.end_s - a.sent_s for a in self.answers if not a.is_long and start_s <= a.sent_s < end_s]

    async def _run(self) -> None:
        async with AsyncClient(self.grpc_url, max_retries=0) as client:
            streams = [asyncio.create_task(self._stream_on(client, index)) for index in range(self.num_streams)]
            running: set[asyncio.Task[None]] = set()
            next_s = time.perf_counter()
            while not self._stopping.is_set():
                number = next(self._numbers)
                prompt = SHORT_PROMPTS[number % len(SHORT_PROMPTS)]
                task = asyncio.create_task(self._ask(client, f"short-{number}", prompt, NUM_SHORT_TOKENS))
                running.add(task)
                task.add_done_callback(running.discard)
                next_s += 1 / self.rate_per_s
                await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            await asyncio.gather(*streams, *running)

    async def _stream_on(self, client: AsyncClient, index: int) -> None:
        prompt = LONG_PROMPTS[index % len(LONG_PROMPTS)]
        while not self._stopping.is_set():
            await self._ask(client, f"long-{next(self._numbers)}", prompt, NUM_LONG_TOKENS)

    async def _ask(self, client: AsyncClient, request_id: str, prompt: str, num_tokens: int) -> None:
        sent_s, first_s = time.perf_counter(), None
        text, build_ids, error = [], set(), ""
        try:
            async for chunk in client.generate_stream(
                prompt, request_id=request_id, timeout_s=120.0, **options(num_tokens)
            ):
                first_s = first_s or time.perf_counter()
                text.append(chunk.text)
                build_ids |= {chunk.build_id} if chunk.build_id else set()
        except EnginehouseError as problem:
            error = f"{type(problem).__name__}: {problem}"
        answer = Answer(
            request_id,
            num_tokens == NUM_LONG_TOKENS,
            sent_s,
            first_s,
            time.perf_counter(),
            frozenset(build_ids),
            "".join(text),
            error,
        )
        self.answers.append(answer)
        if not error and (len(build_ids) != 1 or answer.text != self.expected.get((next(iter(build_ids)), prompt))):
            self.mixed.append(answer)


def options(num_tokens: int) -> dict[str, Any]:
    """Return the options of a request that runs to its full length."""
    return {"max_tokens": num_tokens, "extra_inputs": {"end_id": -1}}


def learn_answers(grpc_url: str, models: Sequence[str], build_ids: Sequence[str]) -> dict[tuple[str, str], str]:
    """Ask each release's own pipeline every prompt of the load; return the texts by build id and prompt."""
    expected = {}
    with Client(grpc_url) as client:
        for model, build_id in zip(models, build_ids, strict=True):
            for prompts, num_tokens in ((SHORT_PROMPTS, NUM_SHORT_TOKENS), (LONG_PROMPTS, NUM_LONG_TOKENS)):
                for prompt in prompts:
                    answer = client.generate(prompt, model=model, **options(num_tokens))
                    expected[build_id, prompt] = answer.text
    return expected
