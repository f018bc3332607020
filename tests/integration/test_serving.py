"""The real server with the real model: every model of the repository, through every door of the client."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from enginehouse_client import FRONT_DOOR, AsyncClient, Client
from enginehouse_contract.manifest import read_manifest
from enginehouse_contract.tensors import MODELS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import RunningServer

pytestmark = [pytest.mark.integration, pytest.mark.model]

PROMPT = "The capital of France is"
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: RunningServer) -> Client:
    """A client of the shared server, over each protocol."""
    with Client(server.grpc_url if request.param == "grpc" else server.http_url) as client:
        yield client


@pytest.mark.parametrize("model", ["ensemble", FRONT_DOOR])
def test_streamed_and_whole_answers_agree(client: Client, model: str) -> None:
    """A stream's joined text is the whole answer's text, the same through every door and protocol."""
    chunks = list(client.generate_stream(PROMPT, max_tokens=16, model=model))
    whole = client.generate(PROMPT, max_tokens=16, model=model)

    assert len(chunks) > 4
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.text.startswith(" Paris")


@pytest.mark.parametrize("model", ["ensemble", FRONT_DOOR])
def test_chat_messages_go_through_the_models_template(client: Client, model: str) -> None:
    """Messages are rendered by the build's own template, whichever door they come through."""
    answer = client.generate(messages=CHAT, max_tokens=24, model=model)

    assert "Paris" in answer.text


def test_the_front_door_reports_how_it_ended_and_what_it_took(client: Client, smollm2_build: Path) -> None:
    """The last piece has the finish reason, exact token counts, the request id and the build that answered."""
    result = client.generate(PROMPT, max_tokens=8, request_id="my-request")
    stopped = client.generate(messages=CHAT, max_tokens=64)

    assert result.finish_reason == "length"
    assert result.usage.num_output_tokens == 8
    assert result.usage.num_input_tokens == 5
    assert result.request_id == "my-request"
    assert result.build_id == read_manifest(smollm2_build).build_id
    assert stopped.finish_reason == "stop"


def test_same_seed_same_text(client: Client) -> None:
    """Sampling repeats with its seed and differs without it."""
    options = {"max_tokens": 12, "top_k": 50, "temperature": 1.2}
    first = client.generate(PROMPT, seed=7, **options)
    again = client.generate(PROMPT, seed=7, **options)
    others = {client.generate(PROMPT, seed=seed, **options).text for seed in range(4)}

    assert first.text == again.text
    assert len(others) > 1


def test_several_sequences_of_one_prompt(client: Client) -> None:
    """N sequences come back in order, each with its own text and end."""
    result = client.generate(PROMPT, n=3, top_k=50, temperature=1.5, seed=3, max_tokens=10)

    assert len(result.sequences) == 3
    assert len({sequence.text for sequence in result.sequences}) == 3
    assert {sequence.usage.num_output_tokens for sequence in result.sequences} == {10}


def test_stop_strings_fall_on_any_token_boundary(client: Client) -> None:
    """The text ends before a stop string that begins and ends inside tokens; nothing of it is shown."""
    whole = client.generate("1 2 3 4 5", max_tokens=24)
    middle = whole.text[5:9]
    stopped = client.generate("1 2 3 4 5", max_tokens=24, stop=[middle])

    assert stopped.text == whole.text[: whole.text.index(middle)]
    assert stopped.finish_reason == "stop"


def test_bad_words_never_appear(client: Client) -> None:
    """A banned text does not come, whatever tokens would make it."""
    free = client.generate(PROMPT, max_tokens=16)
    banned = client.generate(PROMPT, max_tokens=16, bad_words=["Paris", "ris"])

    assert "Paris" in free.text
    assert "ris" not in banned.text


def test_characters_of_several_tokens_arrive_whole(server: RunningServer) -> None:
    """No piece of a stream holds a replacement character, through the ensemble and the front door alike."""
    messages = [{"role": "user", "content": "Repeat exactly: 你好世界 🎉🎊 naïve café"}]
    with Client(server.grpc_url) as client:
        for model in ("ensemble", FRONT_DOOR):
            pieces = [c.text for c in client.generate_stream(messages=messages, max_tokens=40, model=model)]
            assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_many_streams_at_once_each_get_their_own_answer(server: RunningServer) -> None:
    """Concurrent streams give the text each gives alone: batching mixes nothing up."""
    prompts = [f"{number} + {number} =" for number in range(12)]

    async def ask_all() -> list[str]:
        async with AsyncClient(server.grpc_url) as client:
            results = await asyncio.gather(*(client.generate(prompt, max_tokens=12) for prompt in prompts))
            return [result.text for result in results]

    together = asyncio.run(ask_all())
    with Client(server.grpc_url) as client:
        alone = [client.generate(prompt, max_tokens=12).text for prompt in prompts]

    assert together == alone


def test_log_probs_cover_every_token(server: RunningServer) -> None:
    """Log probabilities are negative, one for each generated token, and add up to the cumulative one."""
    with Client(server.grpc_url) as client:
        (sequence,) = client.generate(PROMPT, max_tokens=8, return_log_probs=True).sequences

    assert len(sequence.log_probs) == 8
    assert all(value <= 0.0 for value in sequence.log_probs)
    assert sequence.cum_log_prob == pytest.approx(sum(sequence.log_probs), abs=1e-3)


def test_a_second_prompt_reuses_the_first_ones_prefix(server: RunningServer) -> None:
    """Blocks that a request computed are not computed again for the same beginning, and are reported as cached."""
    long = "Once upon a time there was a fox who lived in a forest. " * 12
    with Client(server.grpc_url) as client:
        first = client.generate(long + "It", max_tokens=4)
        second = client.generate(long + "He", max_tokens=4)

    assert first.usage.num_cached_input_tokens is not None
    assert second.usage.num_cached_input_tokens is not None
    assert second.usage.num_cached_input_tokens >= 128
    assert second.usage.num_cached_input_tokens < second.usage.num_input_tokens


def test_the_engine_model_speaks_the_official_contract(server: RunningServer) -> None:
    """A plain tritonclient gets official tensors: batched rows come as batch-1 responses with their batch_index."""
    ids = np.array([[504, 3575, 282, 4649, 314]] * 2, np.int32)
    values = {
        "input_ids": ids,
        "input_lengths": np.array([[5], [4]], np.int32),
        "request_output_len": np.array([[3], [2]], np.int32),
        "streaming": np.array([[False], [False]]),
        "exclude_input_in_output": np.array([[True], [False]]),
        "return_num_output_tokens": np.array([[True], [True]]),
        "return_perf_metrics": np.array([[True], [True]]),
    }
    responses = infer_stream(server, "tensorrt_llm", values)
    by_row = {int(response["batch_index"][0, 0]): response for response in responses}

    assert sorted(by_row) == [0, 1]
    assert by_row[0]["output_ids"].shape == (1, 1, 3)
    assert by_row[1]["output_ids"][0, 0, :4].tolist() == ids[1, :4].tolist()
    assert by_row[1]["sequence_length"].tolist() == [[6]]
    assert [int(by_row[row]["num_output_tokens"][0, 0]) for row in (0, 1)] == [3, 2]
    assert int(by_row[0]["first_token_time_ns"][0, 0]) > int(by_row[0]["arrival_time_ns"][0, 0])


def test_stop_ends_the_request_in_flight_under_its_id(server: RunningServer) -> None:
    """A second request with `stop` and the same id ends a long stream early."""
    values = {
        "input_ids": np.array([[504, 3575, 282, 4649, 314]], np.int32),
        "input_lengths": np.array([[5]], np.int32),
        "request_output_len": np.array([[2000]], np.int32),
        "streaming": np.array([[True]]),
    }
    seen: list[dict[str, Any]] = []

    def stop_after_three(response: dict[str, Any]) -> None:
        seen.append(response)
        if len(seen) == 3:
            infer_stream(server, "tensorrt_llm", {**values, "stop": np.array([[True]])}, request_id="long")

    infer_stream(server, "tensorrt_llm", values, request_id="long", on_response=stop_after_three)

    assert 3 <= len(seen) < 1000


def test_metadata_lists_the_contract(server: RunningServer) -> None:
    """The server describes each model with the contract's tensors."""
    with tritonclient.http.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        for name, model in MODELS.items():
            metadata = client.get_model_metadata(name)
            assert {tensor["name"] for tensor in metadata["inputs"]} == {tensor.name for tensor in model.inputs}
            assert {tensor["name"] for tensor in metadata["outputs"]} == {tensor.name for tensor in model.outputs}


def test_metrics_have_their_official_names(server: RunningServer) -> None:
    """The gauges and histograms of TensorRT-LLM's model are served, and latency histograms beside them."""
    with Client(server.grpc_url) as client:
        client.generate(PROMPT, max_tokens=4)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.state.metrics_port}/metrics", timeout=10) as response:
        text = response.read().decode()

    for name in (
        "nv_trt_llm_request_metrics",
        "nv_trt_llm_kv_cache_block_metrics",
        "nv_trt_llm_inflight_batcher_metrics",
        "nv_trt_llm_runtime_memory_metrics",
        "nv_trt_llm_general_metrics",
        "nv_llm_input_token_len",
        "nv_llm_output_token_len",
        "nv_llm_time_to_first_token_ms",
        "nv_llm_inter_token_latency_ms",
    ):
        assert f"\n{name}" in text or text.startswith(name), name


def test_http_generate_takes_plain_json(server: RunningServer) -> None:
    """`/generate` works with nothing but an HTTP library."""
    body = json.dumps({"text_input": PROMPT, "max_tokens": 4, "exclude_input_in_output": True}).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/models/ensemble/generate", body)  # noqa: S310 - local
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - our own server
        answer = json.load(response)

    assert answer["text_output"].startswith(" Paris")


def infer_stream(
    server: RunningServer,
    model: str,
    values: dict[str, np.ndarray],
    *,
    request_id: str = "",
    on_response: Any = None,
) -> list[dict[str, Any]]:
    """Send one request with tritonclient's own gRPC stream and return its data responses as arrays."""
    import queue  # noqa: PLC0415

    results: queue.Queue[Any] = queue.Queue()
    inputs = []
    for name, array in values.items():
        data_type = MODELS[model].input(name).data_type
        tensor = tritonclient.grpc.InferInput(name, array.shape, data_type)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    responses = []
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)
        while True:
            result, error = results.get(timeout=120)
            assert error is None, error
            response = result.get_response()
            if response.outputs:
                arrays = {output.name: result.as_numpy(output.name) for output in response.outputs}
                responses.append(arrays)
                if on_response is not None:
                    on_response(arrays)
            if response.parameters["triton_final_response"].bool_param:
                return responses
