"""The systems that `bench_engine.py` compares: each continues prompts greedily, all in one batch, and times itself."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import openvino as ov

from enginehouse_backends.engine.engine import Engine, EngineConfig
from enginehouse_backends.engine.request import GenerationRequest, RequestId
from enginehouse_backends.engine.runner import OpenVinoRunner
from enginehouse_backends.engine.scheduler import SchedulerConfig
from enginehouse_backends.tokenization.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse_backends.engine.request import SequenceOutput
    from enginehouse_backends.engine.runner import ExecutionMode
    from enginehouse_backends.engine.step import Runner

    Prompts = list[list[int]]

MAX_BATCH_SIZE = 32
MAX_NUM_TOKENS = 2048
MAX_SEQ_LEN = 2048
KV_MEMORY_BYTES = 1 << 30
EOS_ID = 2  # never stops a benchmark, but OpenVINO GenAI wants one


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until every prompt had its first token, and from then until every sequence had its last."""

    prefill_s: float
    decode_s: float


class System(Protocol):
    """Something that generates."""

    def generate(self, prompts: Prompts, num_new_tokens: int) -> Times:
        """Continue all prompts at once by exactly *num_new_tokens* each."""
        ...


class Enginehouse:
    """Our engine: scheduler, runner, sampler, delivery. Use as a context manager."""

    def __init__(self, runner: Runner) -> None:
        limits = SchedulerConfig(max_num_tokens=MAX_NUM_TOKENS, max_batch_size=MAX_BATCH_SIZE, max_seq_len=MAX_SEQ_LEN)
        vocabulary = Vocabulary([b"."] * runner.vocab_size, frozenset(), is_byte_level=True)
        self.engine = Engine(runner, vocabulary, EngineConfig(limits, enable_kv_cache_reuse=False))
        self._num_requests = 0

    def generate(self, prompts: Prompts, num_new_tokens: int) -> Times:
        """Submit all prompts before the next step, and take the times that the engine recorded itself."""
        outputs = self.generate_all(prompts, [num_new_tokens] * len(prompts))
        start_ns = min(output.stats.arrival_time_ns for output in outputs)
        first_ns = max(output.stats.first_token_time_ns for output in outputs)
        last_ns = max(output.stats.last_token_time_ns for output in outputs)
        return Times((first_ns - start_ns) / 1e9, (last_ns - first_ns) / 1e9)

    def generate_all(self, prompts: Prompts, num_new_tokens: list[int]) -> list[SequenceOutput]:
        """Continue every prompt by its own number of tokens; return the last output of each."""
        outputs: list[SequenceOutput] = []
        all_done = threading.Event()

        def on_output(output: SequenceOutput) -> None:
            if output.finish_reason is not None:
                outputs.append(output)
                if len(outputs) == len(prompts):
                    all_done.set()

        with self.engine._wake:  # so that one step takes them all
            for prompt, num_tokens in zip(prompts, num_new_tokens, strict=True):
                self._num_requests += 1
                request = GenerationRequest(
                    request_id=RequestId(str(self._num_requests)),
                    prompt_token_ids=tuple(prompt),
                    max_new_tokens=num_tokens,
                    arrival_time_ns=time.monotonic_ns(),
                )
                self.engine.submit(request, on_output)
        all_done.wait()
        failed = [output.error for output in outputs if output.error]
        assert not failed, failed
        return outputs


def load_enginehouse(build_dir: Path, kv_precision: str, execution_mode: ExecutionMode) -> Enginehouse:
    """Our engine on a build."""
    return Enginehouse(
        OpenVinoRunner.load(
            build_dir, kv_memory_bytes=KV_MEMORY_BYTES, kv_precision=kv_precision, execution_mode=execution_mode
        )
    )


class OpenVinoGenAI:
    """OpenVINO GenAI's continuous batching, in C++, on the same build and with its default arithmetic."""

    def __init__(self, build_dir: Path, kv_precision: str) -> None:
        import openvino_genai  # noqa: PLC0415 - an extra that only this class needs

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_MEMORY_BYTES >> 30  # GB
        scheduler.max_num_batched_tokens = MAX_NUM_TOKENS
        scheduler.max_num_seqs = MAX_BATCH_SIZE
        scheduler.enable_prefix_caching = False
        properties = {"KV_CACHE_PRECISION": kv_precision}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(build_dir), scheduler, "CPU", properties)
        self._config = openvino_genai.GenerationConfig()
        self._config.do_sample = False
        self._config.ignore_eos = True
        self._config.set_eos_token_id(EOS_ID)
        self._num_requests = 0

    def generate(self, prompts: Prompts, num_new_tokens: int) -> Times:
        """The first step computes all prompts; the others one token for each sequence."""
        self._config.max_new_tokens = num_new_tokens
        handles = []
        start_s = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            token_ids = ov.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._num_requests, token_ids, self._config))
        self._pipeline.step()
        first_s = time.perf_counter()
        assert all(handle.can_read() for handle in handles), "the prompts did not fit into one step"
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        last_s = time.perf_counter()
        assert all(len(handle.read_all()[0].generated_ids) == num_new_tokens for handle in handles)
        return Times(first_s - start_s, last_s - first_s)


class LlamaCpp:
    """llama.cpp's batched decoding through the low-level part of llama-cpp-python, sampling by numpy's argmax."""

    def __init__(self, gguf_path: Path, num_threads: int) -> None:
        import llama_cpp  # noqa: PLC0415 - installed only where somebody wants this comparison

        self._api: Any = llama_cpp
        llama_cpp.llama_log_set(_silent_log(llama_cpp), ctypes.c_void_p(0))
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = False  # on hosts with AMX those of 0.3.36 die of an illegal instruction
        model = llama_cpp.llama_model_load_from_file(str(gguf_path).encode(), model_params)
        assert model, f"llama.cpp cannot load {gguf_path}"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = MAX_BATCH_SIZE * 256
        params.n_batch = MAX_NUM_TOKENS
        params.n_seq_max = MAX_BATCH_SIZE
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        assert self._context, "llama.cpp made no context"
        self._batch = llama_cpp.llama_batch_init(MAX_NUM_TOKENS, 0, 1)

    def generate(self, prompts: Prompts, num_new_tokens: int) -> Times:
        """One decode call computes all prompts; the others one token for each sequence."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)  # noqa: FBT003 - C has no names
        start_s = time.perf_counter()
        next_ids = self._decode(prompts, [0] * len(prompts))
        first_s = time.perf_counter()
        for step in range(num_new_tokens - 1):
            next_ids = self._decode([[token_id] for token_id in next_ids], [len(prompt) + step for prompt in prompts])
        return Times(first_s - start_s, time.perf_counter() - first_s)

    def _decode(self, token_ids: Prompts, num_past_tokens: list[int]) -> list[int]:
        batch, rows = self._batch, []
        row = 0
        for sequence, (tokens, past) in enumerate(zip(token_ids, num_past_tokens, strict=True)):
            for position, token_id in enumerate(tokens, start=past):
                batch.token[row] = token_id
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = position == past + len(tokens) - 1
                row += 1
            rows.append(row - 1)
        batch.n_tokens = row
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode failed with {status}"
        logits = (self._api.llama_get_logits_ith(self._context, row) for row in rows)
        return [int(np.ctypeslib.as_array(values, (self._vocab_size,)).argmax()) for values in logits]


def has_llama_cpp() -> bool:
    """Whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def _silent_log(llama_cpp: Any) -> Any:
    global _LOG_CALLBACK  # noqa: PLW0603 - C keeps the pointer, so Python must keep the function
    _LOG_CALLBACK = llama_cpp.llama_log_callback(lambda *_: None)
    return _LOG_CALLBACK


_LOG_CALLBACK: Any = None
