"""TensorRT-LLM's LLM and Triton's Python utilities as a Triton model sees them, with scripted answers.

Names and types are checked against the record (:mod:`tests.support.strict_tensorrt_llm`); as in the real LLM API, one
`RequestOutput` is yielded again at each step, so that what is not copied at once is lost.
"""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.strict_tensorrt_llm import api, check_arguments, strict_class

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class ScriptedLlm:
    """Answers every prompt with *steps*: the token ids that come at a time. Tests set the class attributes."""

    steps: Sequence[Sequence[int]] = ((5,), (6, 7), (8,))
    is_endless = False
    error: Exception | None = None

    def __init__(self, **arguments: Any) -> None:
        record = api()
        check_arguments("LLM", record["schemas"]["tensorrt_llm.llmapi.llm_args.TorchLlmArgs"], arguments)
        self.arguments = arguments
        self.requests: list[ScriptedOutput] = []
        self.is_shut_down = False

    def generate_async(self, inputs: Any, **given: Any) -> ScriptedOutput:
        parameters = api()["callables"]["tensorrt_llm.LLM.generate_async"]
        check_arguments("generate_async", parameters, {"inputs": inputs, **given})
        if self.error is not None:
            raise self.error
        output = ScriptedOutput(self, inputs["prompt_token_ids"], given)
        self.requests.append(output)
        return output

    def shutdown(self) -> None:
        self.is_shut_down = True


class ScriptedOutput:
    """A `RequestOutput`."""

    def __init__(self, llm: ScriptedLlm, prompt: list[int], given: dict[str, Any]) -> None:
        self.prompt, self.given, self._llm = prompt, given, llm
        self.cached_tokens = 4
        self.is_aborted = False
        wants_log_probs = given["sampling_params"].logprobs is not None
        self.outputs = [Completion(index, wants_log_probs) for index in range(given["sampling_params"].n)]

    def abort(self) -> None:
        self.is_aborted = True

    async def __aiter__(self) -> AsyncIterator[ScriptedOutput]:
        limit = self.given["sampling_params"].max_tokens
        num_tokens, step = 0, 0
        while not self.is_aborted:
            await asyncio.sleep(0)
            ids = self._llm.steps[min(step, len(self._llm.steps) - 1)]
            num_tokens, step = num_tokens + len(ids), step + 1
            ends = not self._llm.is_endless and (step == len(self._llm.steps) or num_tokens >= limit)
            for completion in self.outputs:
                completion.advance(ids, ends=ends)
            yield self
            if ends:
                return


class Completion:
    """A `CompletionOutput`."""

    def __init__(self, index: int, wants_log_probs: bool) -> None:
        self.index, self._wants_log_probs = index, wants_log_probs
        self.token_ids_diff: list[int] = []
        self.logprobs_diff: list[dict[int, Any]] | None = None
        self.finish_reason: str | None = None
        self.request_perf_metrics: Any = None

    def advance(self, ids: Sequence[int], *, ends: bool) -> None:
        self.token_ids_diff = list(ids)
        if self._wants_log_probs:
            self.logprobs_diff = [{token_id: SimpleNamespace(logprob=-token_id / 10)} for token_id in ids]
        if ends:
            self.finish_reason = "length"
            self.request_perf_metrics = SimpleNamespace(
                timing_metrics=SimpleNamespace(
                    arrival_time=timedelta(seconds=1),
                    first_scheduled_time=timedelta(seconds=2),
                    first_token_time=timedelta(seconds=3),
                    last_token_time=timedelta(seconds=4),
                ),
                kv_cache_metrics=SimpleNamespace(
                    num_new_allocated_blocks=2, num_reused_blocks=1, num_total_allocated_blocks=3
                ),
                speculative_decoding=SimpleNamespace(
                    acceptance_rate=0.5, total_accepted_draft_tokens=2, total_draft_tokens=4
                ),
            )


class Sender:
    """A response sender that keeps what was sent and fails a test that breaks Triton's rules."""

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.is_final = threading.Event()
        self.has_left = False

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self.is_final.is_set():
            raise AssertionError("a response after the final one")
        if response is not None:
            self.responses.append(response)
            if response.error is not None and not flags:
                raise AssertionError("an error apart from its FINAL flag")
        if flags:
            self.is_final.set()

    def is_cancelled(self) -> bool:
        if self.is_final.is_set():
            raise AssertionError("is_cancelled after the final response crashes Triton")
        return self.has_left


class Request:
    """One request of *tensors*, with the outputs of the contract requested."""

    def __init__(self, tensors: dict[str, Any], requested: Sequence[str], request_id: str = "") -> None:
        self._tensors, self._requested, self._id = tensors, requested, request_id
        self.sender = Sender()

    def request_id(self) -> str:
        return self._id

    def requested_output_names(self) -> list[str]:
        return list(self._requested)

    def get_response_sender(self) -> Sender:
        return self.sender

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, np.asarray(value)) for name, value in self._tensors.items()]


class Tensor:
    """A tensor of Triton."""

    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError(Exception):
    """An error with Triton's code."""

    INVALID_ARG, INTERNAL, CANCELLED = "INVALID_ARG", "INTERNAL", "CANCELLED"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class InferenceResponse:
    """A response."""

    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


def make_modules() -> dict[str, ModuleType]:
    """Return the modules that the Triton model imports, by name."""
    utils, package = ModuleType("triton_python_backend_utils"), ModuleType("tensorrt_llm")
    vars(utils).update(
        Tensor=Tensor,
        InferenceResponse=InferenceResponse,
        TritonError=TritonError,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        Logger=SimpleNamespace(log_error=lambda _text: None),
    )
    vars(package).update(LLM=ScriptedLlm, SamplingParams=strict_class("tensorrt_llm.SamplingParams"))
    executor, request = ModuleType("tensorrt_llm.executor"), ModuleType("tensorrt_llm.executor.request")
    vars(request).update(LoRARequest=strict_class("tensorrt_llm.executor.request.LoRARequest"))
    torch = ModuleType("torch")
    vars(torch).update(from_numpy=lambda array: array)
    return {
        "torch": torch,
        "triton_python_backend_utils": utils,
        "tensorrt_llm": package,
        "tensorrt_llm.executor": executor,
        "tensorrt_llm.executor.request": request,
    }
