"""What the front door costs: token rate against the engine alone, time to first token, an instant engine, cancellation.

    python tests/benchmarks/bench_frontdoor.py

Rates and times of engine and front door alternate in one run; medians. The last line is one JSON object:
``rate_ratio_32`` front door over engine at 32 streams, ``added_ttft_ms`` at idle, ``stub_tokens_per_s`` over an engine
that answers at once, ``cancel_ms`` from a client's cancel to an idle engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.engines import load_runner, make_request, running_engine
from tests.support.metrics import read_gauge
from tests.support.servers import RunningServer, instant_server, running_server

from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_client import AsyncClient, Client
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from enginehouse_backends.engine.engine import Engine
    from enginehouse_backends.engine.request import SequenceOutput

NUM_STREAMS = 32
NUM_TOKENS = 48
NUM_ROUNDS = 3
NUM_FIRST_TOKENS = 15
NUM_CANCELS = 9
NUM_STUB_TOKENS = 1500
PROMPTS = [f"Tell me about the number {number} and its neighbours." for number in range(NUM_STREAMS)]


def main() -> None:
    """Run everything and print the result."""
    settings = load_settings()
    build_dir = build_engine(BuildOptions(model=fetch_demo_model(settings.cache_dir)), settings.store_dir).build_dir
    encode = load_tokenizer(build_dir).encode
    prompts = [encode(prompt) for prompt in PROMPTS]
    rates: dict[str, list[float]] = {"engine": [], "front door": []}
    firsts: dict[str, list[float]] = {"engine": [], "front door": []}
    with engine_and_server(build_dir) as (engine, server):
        for _ in range(NUM_ROUNDS):
            rates["engine"].append(engine_rate(engine, prompts))
            rates["front door"].append(asyncio.run(front_door_rate(server, PROMPTS, NUM_TOKENS)))
        for number in range(NUM_FIRST_TOKENS):
            firsts["engine"].append(engine_first_token_s(engine, prompts[number % NUM_STREAMS]))
            firsts["front door"].append(front_door_first_token_s(server, PROMPTS[number % NUM_STREAMS]))
        cancels = [cancel_s(server) for _ in range(NUM_CANCELS)]
    with tempfile.TemporaryDirectory() as home, instant_server(build_dir, Path(home)) as server:
        asyncio.run(front_door_rate(server, PROMPTS, 100))
        stub_rates = [asyncio.run(front_door_rate(server, PROMPTS, NUM_STUB_TOKENS)) for _ in range(NUM_ROUNDS)]
    for name, values in rates.items():
        first_ms = 1000 * median(firsts[name])
        sys.stdout.write(f"{name:11} {median(values):7.1f} tokens/s, first token {first_ms:6.1f} ms\n")
    added_s = median(b - a for a, b in zip(firsts["engine"], firsts["front door"], strict=True))
    ratios = [b / a for a, b in zip(rates["engine"], rates["front door"], strict=True)]
    result = {
        "rate_ratio_32": round(median(ratios), 3),
        "added_ttft_ms": round(1000 * added_s, 1),
        "stub_tokens_per_s": round(median(stub_rates)),
        "cancel_ms": round(1000 * median(cancels), 1),
    }
    sys.stdout.write(json.dumps(result) + "\n")


@contextmanager
def engine_and_server(build_dir: Path) -> Iterator[tuple[Engine, RunningServer]]:
    """Run the engine by itself and a server beside it, set alike: no prefix is reused, so that rounds are equal."""
    parameters = {"stats_check_period_ms": "10", "enable_kv_cache_reuse": "false"}
    with (
        tempfile.TemporaryDirectory() as home,
        running_server(build_dir, Path(home), parameters) as server,
        running_engine(load_runner(build_dir), build_dir, max_num_tokens=512, enable_kv_cache_reuse=False) as engine,
    ):
        yield engine, server


def served_rate_ratio(build_dir: Path) -> float:
    """Return the median token rate through the server over the engine's own, at 32 streams, in alternating pairs."""
    encode = load_tokenizer(build_dir).encode
    prompts = [encode(prompt) for prompt in PROMPTS]
    with engine_and_server(build_dir) as (engine, server):
        pairs = [
            (engine_rate(engine, prompts), asyncio.run(front_door_rate(server, PROMPTS, NUM_TOKENS)))
            for _ in range(NUM_ROUNDS)
        ]
    return median(served / own for own, served in pairs)


def engine_rate(engine: Engine, prompts: list[list[int]]) -> float:
    """Tokens per second of all prompts generated together by the engine itself."""
    done = threading.Semaphore(0)

    def count(output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            done.release()

    started_s = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(make_request(f"{started_s}/{index}", prompt, NUM_TOKENS), count)
    for _ in prompts:
        done.acquire()
    return len(prompts) * NUM_TOKENS / (time.perf_counter() - started_s)


async def front_door_rate(server: RunningServer, prompts: list[str], num_tokens: int) -> float:
    """Tokens per second of all prompts streamed together through the front door."""
    async with AsyncClient(server.grpc_url) as client:

        async def stream(prompt: str) -> int:
            count = 0
            options: dict[str, Any] = {"max_tokens": num_tokens, "extra_inputs": {"end_id": -1}}  # no end token
            async for chunk in client.generate_stream(prompt, **options):
                count = chunk.usage.num_output_tokens or count
            return count

        started_s = time.perf_counter()
        counts = await asyncio.gather(*map(stream, prompts))
        return sum(counts) / (time.perf_counter() - started_s)


def engine_first_token_s(engine: Engine, prompt: list[int]) -> float:
    """Seconds from submission to the first token, at idle."""
    first, done = threading.Event(), threading.Event()

    def collect(output: SequenceOutput) -> None:
        first.set()
        if output.finish_reason is not None:
            done.set()

    started_s = time.perf_counter()
    engine.submit(make_request(f"first/{started_s}", prompt, 3), collect)
    first.wait()
    elapsed_s = time.perf_counter() - started_s
    done.wait()
    return elapsed_s


def front_door_first_token_s(server: RunningServer, prompt: str) -> float:
    """Seconds from the client's call to its first piece, at idle."""
    with Client(server.grpc_url) as client:
        client.server_ready()
        started_s = time.perf_counter()
        chunks = client.generate_stream(prompt, max_tokens=3)
        next(chunks)
        elapsed_s = time.perf_counter() - started_s
        for _ in chunks:
            pass
    return elapsed_s


def cancel_s(server: RunningServer) -> float:
    """Seconds from closing a stream to an engine without an active sequence."""
    with Client(server.grpc_url) as client:
        chunks = client.generate_stream(PROMPTS[0], max_tokens=2000, min_tokens=2000)
        for _ in range(5):
            next(chunks)
        started_s = time.perf_counter()
        chunks.close()
        while read_gauge(server, "nv_trt_llm_request_metrics", "active"):
            time.sleep(0.005)
        return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
