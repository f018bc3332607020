"""The Triton model `tensorrt_llm` over TensorRT-LLM's LLM API: NVIDIA's tensor contract, token ids in and out.

This file is copied into a build as `triton/tensorrt_llm/1/model.py`; it is one file because Triton loads one, and needs
nothing of Enginehouse: numpy, PyYAML and TensorRT-LLM 1.2 or newer. The parameter `gpt_model_path` names the build. A
request of n rows yields n independent streams; a streamed response carries new tokens only. One event loop answers all
requests, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor.request import LoRARequest

_CANCEL_CHECK_S = 0.1
_SAMPLING: dict[str, tuple[str, Any, Any]] = {  # tensor -> SamplingParams; values that mean "unset" are left out
    "runtime_top_k": ("top_k", int, lambda value: value > 0),
    "runtime_top_p": ("top_p", float, lambda value: value > 0),
    "runtime_top_p_min": ("top_p_min", float, None),
    "runtime_top_p_decay": ("top_p_decay", float, None),
    "runtime_top_p_reset_ids": ("top_p_reset_ids", int, lambda value: value >= 0),
    "temperature": ("temperature", float, None),
    "repetition_penalty": ("repetition_penalty", float, None),
    "presence_penalty": ("presence_penalty", float, None),
    "frequency_penalty": ("frequency_penalty", float, None),
    "min_tokens": ("min_tokens", int, None),
    "min_length": ("min_tokens", int, None),
    "seed": ("seed", int, None),
    "random_seed": ("seed", int, None),
}
_READ = {
    *_SAMPLING,
    "input_ids", "input_lengths", "request_output_len", "num_return_sequences", "beam_width", "end_id", "pad_id",
    "stop_words_list", "bad_words_list", "embedding_bias", "return_log_probs", "return_context_logits",
    "return_generation_logits", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens",
    "exclude_input_in_output", "streaming", "stop", "lora_task_id", "draft_acceptance_threshold",
}  # fmt: skip
_NO_EFFECT = {"len_penalty", "early_stopping", "beam_search_diversity_rate", "prompt_vocab_size"}
_NO_LOGITS = ("return_context_logits", "return_generation_logits")


class RefusedError(Exception):
    """A request that this model cannot answer; the message names the tensor."""


@dataclass
class Row:
    """One row of a request, ready for the LLM, and how to report it."""

    prompt: list[int]
    sampling: dict[str, Any]
    stop_words: list[list[int]]
    lora_task_id: int
    num_sequences: int
    flags: dict[str, bool]


@dataclass
class Sequence:
    """What one sequence has produced so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_sent: int = 0
    is_finished: bool = False


class Answer:
    """The responses of one Triton request. An error travels with the FINAL flag, and nothing follows it."""

    def __init__(self, request: Any) -> None:
        self.request_id = request.request_id()
        self.requested = set(request.requested_output_names())
        self.sender = request.get_response_sender()
        self.outputs: list[Any] = []  # of the LLM, to abort
        self.num_open = 0

    def send(self, tensors: dict[str, Any], *, final: bool) -> None:
        """Send those tensors that the client asked for."""
        wanted = [pb_utils.Tensor(name, value) for name, value in tensors.items() if name in self.requested]
        self._send(pb_utils.InferenceResponse(wanted), final=final)

    def fail(self, message: str, code: Any) -> None:
        """End with an error."""
        self.abort()
        self._send(pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code)), final=True)

    def close(self) -> None:
        """End without data."""
        self._send(None, final=True)

    def abort(self) -> None:
        """Make the LLM stop what it computes for this request."""
        for output in self.outputs:
            output.abort()

    def is_cancelled(self) -> bool:
        """Whether the client has left; never asked after the final response, which would crash Triton."""
        return self.sender is not None and bool(self.sender.is_cancelled())

    def _send(self, response: Any, *, final: bool) -> None:
        sender = self.sender
        if sender is None:
            return
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        if final:
            self.sender = None
        if response is None:
            sender.send(flags=flags)
        else:
            sender.send(response, flags=flags)


class TritonPythonModel:
    """Serves the contract of NVIDIA's `tensorrt_llm` model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the build that `gpt_model_path` names and start the event loop."""
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        build = Path(parameters["gpt_model_path"])
        arguments = yaml.safe_load((build / "model.yaml").read_text(encoding="utf-8"))
        if "lora_config" in arguments:
            arguments["lora_config"]["lora_dir"] = [str(build / name) for name in arguments["lora_config"]["lora_dir"]]
        if "speculative_model_dir" in arguments.get("speculative_config", {}):
            arguments["speculative_config"]["speculative_model_dir"] = str(build / "draft")
        self._adapters = arguments.get("lora_config", {}).get("lora_dir", [])
        self._max_input_len, self._max_seq_len = arguments["max_input_len"], arguments["max_seq_len"]
        self._exclude_input = parameters.get("exclude_input_in_output", "").lower() in {"true", "1"}
        self._llm = LLM(model=str(build / "model"), **arguments)
        self._in_flight: set[Answer] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm-api", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Start every request; answers come from the event loop."""
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            asyncio.run_coroutine_threadsafe(self._answer(Answer(request), inputs), self._loop)

    def finalize(self) -> None:
        """End what is in flight, the event loop, then the LLM."""
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._llm.shutdown()

    async def _drain(self) -> None:
        for answer in self._in_flight:
            answer.abort()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    async def _answer(self, answer: Answer, inputs: dict[str, Any]) -> None:
        codes = pb_utils.TritonError
        try:
            if "stop" in inputs and bool(inputs["stop"].any()):
                self._stop(answer)
                return
            rows = read_rows(inputs, self._max_input_len, self._max_seq_len, exclude_input=self._exclude_input)
            for row in rows:
                if row.lora_task_id > (limit := len(self._adapters)):
                    raise RefusedError(f"`lora_task_id` names no adapter; limit {limit}, given {row.lora_task_id}.")  # noqa: TRY301 - all refusals end below
            answer.num_open = sum(row.num_sequences for row in rows)
            self._in_flight.add(answer)
            watcher = asyncio.ensure_future(self._watch(answer))
            try:
                indices = [None] if len(rows) == 1 else range(len(rows))
                await asyncio.gather(*(self._generate(answer, row, i) for row, i in zip(rows, indices, strict=True)))
            finally:
                watcher.cancel()
        except RefusedError as error:
            answer.fail(str(error), codes.INVALID_ARG)
        except Exception as error:  # noqa: BLE001 - every request must be answered, whatever went wrong
            pb_utils.Logger.log_error(f"tensorrt_llm: {error!r}")
            answer.fail(f"the LLM API failed: {error}", codes.INTERNAL)
        finally:
            self._in_flight.discard(answer)

    def _stop(self, answer: Answer) -> None:
        if not answer.request_id:
            raise RefusedError("`stop` needs the request id of the request to stop.")
        for other in self._in_flight:
            if other.request_id == answer.request_id:
                other.abort()
        answer.close()

    async def _watch(self, answer: Answer) -> None:
        while answer.sender is not None:
            if answer.is_cancelled():
                answer.fail("the request was cancelled", pb_utils.TritonError.CANCELLED)
            await asyncio.sleep(_CANCEL_CHECK_S)

    async def _generate(self, answer: Answer, row: Row, row_index: int | None) -> None:
        """Generate one row. The LLM always streams, so that stop words of several tokens are seen as they appear."""
        if answer.sender is None:  # the client left before this row began
            return
        output = self._llm.generate_async(
            inputs={"prompt_token_ids": row.prompt},
            sampling_params=SamplingParams(**row.sampling),
            lora_request=self._lora(row.lora_task_id),
            streaming=True,
        )
        answer.outputs.append(output)
        sequences = [Sequence() for _ in range(row.num_sequences)]
        async for step in output:
            for completion in step.outputs:
                sequence = sequences[completion.index]
                if sequence.is_finished:
                    continue
                take(sequence, completion, row.stop_words)
                if sequence.is_finished or (row.flags["streaming"] and len(sequence.token_ids) > sequence.num_sent):
                    answer.num_open -= sequence.is_finished
                    tensors = make_tensors(row, row_index, sequence, completion, step)
                    answer.send(tensors, final=answer.num_open == 0)
                    sequence.num_sent = len(sequence.token_ids)
            if all(sequence.is_finished for sequence in sequences):
                output.abort()  # no-op for a request that has ended
                return
        for index, sequence in enumerate(sequences):  # aborted: a sequence ends where it is
            if not sequence.is_finished:
                answer.num_open -= 1
                tensors = make_tensors(row, row_index, sequence, output.outputs[index], output)
                answer.send(tensors, final=answer.num_open == 0)

    def _lora(self, task_id: int) -> Any:
        if task_id == 0:
            return None
        return LoRARequest(lora_name=f"adapter-{task_id}", lora_int_id=task_id, lora_path=self._adapters[task_id - 1])


def read_rows(inputs: dict[str, Any], max_input_len: int, max_seq_len: int, *, exclude_input: bool) -> list[Row]:
    """Turn a request's tensors into rows; raise :class:`RefusedError` naming the first that cannot be honoured."""
    for name, array in inputs.items():
        if name not in _READ | _NO_EFFECT and array.size:
            raise RefusedError(f"`{name}` is not supported by TensorRT-LLM's LLM API. Leave it out.")
    num_rows = inputs["input_lengths"].shape[0]
    flags = ("streaming", "return_log_probs", "return_perf_metrics", "return_num_input_tokens",
             "return_num_output_tokens", *_NO_LOGITS)  # fmt: skip
    rows = []
    for index in range(num_rows):
        row = {name: array[index] for name, array in inputs.items()}
        values = {name: array.reshape(-1)[0] for name, array in row.items() if array.size}
        length, max_tokens = int(values["input_lengths"]), int(values["request_output_len"])
        prompt = row["input_ids"].reshape(-1)[:length].tolist() if "input_ids" in row else []
        if not 0 < len(prompt) <= max_input_len:
            raise RefusedError(f"`input_ids` is empty or too long; limit {max_input_len} tokens, given {len(prompt)}.")
        if not 0 < max_tokens <= max_seq_len - len(prompt):
            limit = max_seq_len - len(prompt)
            raise RefusedError(f"`request_output_len` does not fit; limit {limit}, given {max_tokens}.")
        if int(values.get("beam_width", 1)) > 1:
            raise RefusedError(f"`beam_width` must be 1; given {values['beam_width']}.")
        chosen = {name: bool(values.get(name, False)) for name in flags}
        chosen["exclude_input"] = bool(values.get("exclude_input_in_output", exclude_input))
        if any(chosen[name] for name in _NO_LOGITS):
            raise RefusedError("logits are not returned by this model. Leave `return_*_logits` out.")
        num_sequences = max(1, int(values.get("num_return_sequences", 1)))
        sampling = read_sampling(row, values, max_tokens, num_sequences, log_probs=chosen["return_log_probs"])
        sampling["return_perf_metrics"] = chosen["return_perf_metrics"]
        stop_words = read_words(row.get("stop_words_list"))
        rows.append(Row(prompt, sampling, stop_words, int(values.get("lora_task_id", 0)), num_sequences, chosen))
    return rows


def read_sampling(
    row: dict[str, Any], values: dict[str, Any], max_tokens: int, num_sequences: int, *, log_probs: bool
) -> dict[str, Any]:
    """Return the keywords of SamplingParams for one row."""
    end_id = int(values.get("end_id", -1))
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "detokenize": False, "end_id": end_id}
    sampling["pad_id"] = int(values.get("pad_id", max(end_id, 0)))
    for tensor, (name, kind, is_set) in _SAMPLING.items():
        if tensor in values and (is_set is None or is_set(values[tensor])):
            sampling[name] = kind(values[tensor])
    if num_sequences > 1:
        sampling["n"] = num_sequences
    if log_probs:
        sampling["logprobs"] = 1
    bad_words = read_words(row.get("bad_words_list"))
    if any(len(word) > 1 for word in bad_words):
        raise RefusedError("`bad_words_list` may hold words of one token only in TensorRT-LLM's LLM API.")
    if bad_words:
        sampling["bad_token_ids"] = [word[0] for word in bad_words]
    if "embedding_bias" in row and row["embedding_bias"].any():
        torch = importlib.import_module("torch")  # the type that SamplingParams wants; no default install has it
        sampling["embedding_bias"] = torch.from_numpy(row["embedding_bias"].reshape(-1).astype(np.float32))
    return sampling


def read_words(array: Any) -> list[list[int]]:
    """Read a word list of shape [2, L]: token ids, flat, and where each word ends, padded with -1."""
    if array is None or array.size == 0:
        return []
    ids, ends = array[0].tolist(), [int(end) for end in array[1] if end >= 0]
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]


def take(sequence: Sequence, completion: Any, stop_words: list[list[int]]) -> None:
    """Append the tokens of one step; a stop word ends the sequence, and stays in it."""
    new_ids = list(completion.token_ids_diff)
    log_probs = list(completion.logprobs_diff or [])
    for position, token_id in enumerate(new_ids):
        sequence.token_ids.append(int(token_id))
        if log_probs:
            sequence.log_probs.append(float(log_probs[position][token_id].logprob))
        if any(sequence.token_ids[-len(word) :] == word for word in stop_words):
            sequence.is_finished = True
            return
    sequence.is_finished = completion.finish_reason is not None


def make_tensors(row: Row, row_index: int | None, sequence: Sequence, completion: Any, step: Any) -> dict[str, Any]:
    """Return the tensors of one response; `step` is the LLM's RequestOutput."""
    start = sequence.num_sent if row.flags["streaming"] else 0
    new_ids = sequence.token_ids[start:]
    with_prompt = not row.flags["streaming"] and not row.flags["exclude_input"]
    ids = [*row.prompt, *new_ids] if with_prompt else new_ids
    tensors: dict[str, Any] = {
        "output_ids": np.array(ids, np.int32).reshape(1, 1, len(ids)),
        "sequence_length": np.array([[len(ids)]], np.int32),
    }
    if row_index is not None:
        tensors["batch_index"] = np.array([[row_index]], np.int32)
    if row.num_sequences > 1:
        tensors["sequence_index"] = np.array([[completion.index]], np.int32)
    if row.flags["return_log_probs"]:
        tensors["cum_log_probs"] = np.array([[sum(sequence.log_probs)]], np.float32)
        tensors["output_log_probs"] = np.array(sequence.log_probs[start:], np.float32).reshape(1, 1, -1)
    if row.flags["return_num_input_tokens"]:
        tensors["num_input_tokens"] = np.array([[len(row.prompt)]], np.int32)
    if row.flags["return_num_output_tokens"]:
        tensors["num_output_tokens"] = np.array([[len(new_ids)]], np.int32)
    if row.flags["return_perf_metrics"] and sequence.is_finished:
        tensors["num_cached_input_tokens"] = np.array([[step.cached_tokens]], np.int32)
        tensors |= perf_tensors(completion.request_perf_metrics)
    return tensors


def perf_tensors(metrics: Any) -> dict[str, Any]:
    """Return the contract's measurements; nothing where the LLM has none."""
    if metrics is None:
        return {}
    cache, drafts, times = metrics.kv_cache_metrics, metrics.speculative_decoding, metrics.timing_metrics
    counts = {
        "kv_cache_alloc_new_blocks": cache.num_new_allocated_blocks,
        "kv_cache_reused_blocks": cache.num_reused_blocks,
        "kv_cache_alloc_total_blocks": cache.num_total_allocated_blocks,
        "total_accepted_draft_tokens": drafts.total_accepted_draft_tokens,
        "total_draft_tokens": drafts.total_draft_tokens,
    }
    names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
    return {
        **{name: np.array([[value]], np.int32) for name, value in counts.items()},
        **{f"{name}_ns": np.array([[round(getattr(times, name).total_seconds() * 1e9)]], np.int64) for name in names},
        "acceptance_rate": np.array([[drafts.acceptance_rate]], np.float32),
    }
