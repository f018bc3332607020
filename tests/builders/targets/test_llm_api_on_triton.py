"""The shipped LLM API model on a real tritonserver, over a TensorRT-LLM that counts upwards from 100."""

from __future__ import annotations

import queue
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.builders.targets.conftest import make_spec
from tritonclient import grpc

from enginehouse_backends.server.supervisor import ServerOptions, TritonServer
from enginehouse_builders.targets.emission import emit
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.builders.targets.conftest import Models

pytestmark = pytest.mark.integration

_COUNTING_LLM = """
import asyncio
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, **given):
        self.max_tokens = given["max_tokens"]


class RequestOutput:
    cached_tokens = 0

    def __init__(self, max_tokens):
        self.max_tokens, self.is_aborted = max_tokens, False
        self.outputs = [SimpleNamespace(index=0, logprobs_diff=None, finish_reason=None, request_perf_metrics=None)]

    def abort(self):
        self.is_aborted = True

    async def __aiter__(self):
        for index in range(self.max_tokens):
            await asyncio.sleep(0.01)
            if self.is_aborted:
                return
            self.outputs[0].token_ids_diff = [100 + index]
            self.outputs[0].finish_reason = "length" if index == self.max_tokens - 1 else None
            yield self


class LLM:
    def __init__(self, **arguments):
        pass

    def generate_async(self, inputs, sampling_params, lora_request, streaming):
        return RequestOutput(sampling_params.max_tokens)

    def shutdown(self):
        pass
"""


def ask(url: str, prompts: list[list[int]], max_tokens: int, **flags: bool) -> list[Any]:
    """Send one request over a gRPC stream; return token ids of each response, or an error's text."""
    values = {
        "input_ids": np.array(prompts, np.int32),
        "input_lengths": np.full((len(prompts), 1), len(prompts[0]), np.int32),
        "request_output_len": np.full((len(prompts), 1), max_tokens, np.int32),
        **{name: np.full((len(prompts), 1), value) for name, value in flags.items()},
    }
    inputs = []
    for name, value in values.items():
        tensor = grpc.InferInput(name, list(value.shape), "BOOL" if value.dtype == bool else "INT32")
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    answers: queue.Queue[Any] = queue.Queue()
    received = []
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("tensorrt_llm", inputs)
        while True:
            result, error = answers.get(timeout=30)
            received.append(str(error) if error else result.as_numpy("output_ids")[0, 0].tolist())
            if error or result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    return received


def test_the_shipped_model_answers_on_a_real_server(models: Models, tmp_path: Path) -> None:
    """Streams, rows and refusals go over the wire as they should, and the server unloads the model when it stops."""
    emitted = emit(
        make_spec(models.hugging_face(), limits={"max_batch_size": 4, "max_seq_len": 64}),
        "tensorrt_llm_pytorch",
        tmp_path / "out",
    )
    build = emitted.folder / "build"
    package = tmp_path / "packages" / "tensorrt_llm"
    (package / "executor").mkdir(parents=True)
    (package / "__init__.py").write_text(_COUNTING_LLM, encoding="utf-8")
    (package / "executor" / "__init__.py").write_text("", encoding="utf-8")
    (package / "executor" / "request.py").write_text("LoRARequest = None\n", encoding="utf-8")

    settings = Settings(home=tmp_path / "home")
    model = settings.repository_dir / "tensorrt_llm"
    shutil.copytree(build / "triton" / "tensorrt_llm", model)
    config = model / "config.pbtxt"
    config.write_text(config.read_text("utf-8").replace("${engine_dir}", str(build)), encoding="utf-8")
    shipped = (model / "1" / "model.py").read_text("utf-8").replace("from __future__ import annotations\n", "")
    on_path = f"import sys\nsys.path.insert(0, {str(package.parent)!r})\nfrom enginehouse_backends import triton\n"
    (model / "1" / "model.py").write_text(on_path + shipped, encoding="utf-8")

    with TritonServer(settings, ServerOptions(settings.repository_dir)) as server:
        assert server.state is not None
        url = server.state.grpc_url
        assert ask(url, [[1, 2]], 3, streaming=True) == [[100], [101], [102]]
        assert sorted(ask(url, [[1, 2], [3, 4]], 2)) == [[1, 2, 100, 101], [3, 4, 100, 101]]
        (refused,) = ask(url, [[1, 2]], 99)
        assert "`request_output_len`" in refused
        assert ask(url, [[1, 2]], 1, exclude_input_in_output=True) == [[100]]
