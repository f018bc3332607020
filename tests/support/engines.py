"""The embedded engine over a real build, without a server."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from enginehouse_backends.engine.engine import Engine, EngineConfig
from enginehouse_backends.engine.request import GenerationRequest, RequestId
from enginehouse_backends.engine.runner import OpenVinoRunner
from enginehouse_backends.engine.scheduler import SchedulerConfig
from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_contract.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from enginehouse_backends.engine.request import SequenceOutput


def load_runner(build_dir: Path, num_kv_tokens: int = 16_384) -> OpenVinoRunner:
    """Compile a build with a KV cache of so many tokens."""
    return OpenVinoRunner.load(
        build_dir,
        kv_memory_bytes=4 << 30,
        max_kv_tokens=num_kv_tokens,
        kv_precision=read_manifest(build_dir).kv_precision,
    )


@contextmanager
def running_engine(runner: OpenVinoRunner, build_dir: Path, **options: Any) -> Iterator[Engine]:
    """Run an engine; *options* are fields of its config or of its scheduler's."""
    scheduler = SchedulerConfig(max_num_tokens=256, max_batch_size=32, max_seq_len=2048)
    scheduler = replace(scheduler, **{name: options.pop(name) for name in list(options) if hasattr(scheduler, name)})
    vocabulary = load_tokenizer(build_dir).vocabulary
    with Engine(runner, vocabulary, EngineConfig(scheduler, **options)) as engine:
        yield engine


def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[SequenceOutput]]:
    """Submit requests together and return each one's last outputs, by sequence index."""
    done = threading.Semaphore(0)
    outputs: dict[RequestId, list[SequenceOutput]] = {request.request_id: [] for request in requests}

    def collect(output: SequenceOutput) -> None:
        outputs[output.request_id].append(output)
        done.release()

    for request in requests:
        engine.submit(request, collect, stream=False)
    for request in requests:
        for _ in range(request.num_return_sequences):
            assert done.acquire(timeout=280), "the engine did not answer"
    return [sorted(outputs[request.request_id], key=lambda out: out.sequence_index) for request in requests]


def make_request(name: str, prompt: Sequence[int], max_new_tokens: int, **fields: Any) -> GenerationRequest:
    """Return a request that never ends early unless *fields* say so."""
    return GenerationRequest(
        request_id=RequestId(name), prompt_token_ids=tuple(prompt), max_new_tokens=max_new_tokens, **fields
    )
