"""Bad input through every door: a clear error, the server goes on, nothing hangs, memory does not grow."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
from tests.support.metrics import resident_kib
from tritonclient.utils import InferenceServerException

from enginehouse_client import FRONT_DOOR, Client
from enginehouse_contract.errors import EnginehouseError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import RunningServer

pytestmark = [pytest.mark.integration, pytest.mark.model]

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("empty prompt", {"prompt": ""}, "is empty"),
    ("over-long prompt", {"prompt": "hi " * 10_000}, "limit 8191 tokens, given 10001 tokens"),
    ("10 MB prompt", {"prompt": "x" * 10_000_000}, "far too long"),
    ("no tokens wanted", {"prompt": "hi", "max_tokens": 0}, "must be at least 1; given 0"),
    ("more tokens than the window", {"prompt": "hi", "max_tokens": 100_000}, "limit 8192, given 100000"),
    ("NaN temperature", {"prompt": "hi", "temperature": float("nan")}, "finite number"),
    ("negative temperature", {"prompt": "hi", "temperature": -1.0}, "must be a finite number, at least 0"),
    ("top_p 2", {"prompt": "hi", "top_p": 2.0}, "at most 1; given 2"),
    ("negative top_k", {"prompt": "hi", "top_k": -1}, "must be at least 0"),
    ("10,000 stop words", {"prompt": "hi", "stop": ["w"] * 10_000}, "holds too many words; limit 1024, given 10000"),
    ("two names, two values", {"prompt": "hi", "seed": 1, "extra_inputs": {"random_seed": 2}}, "differ"),
    ("beam search", {"prompt": "hi", "extra_inputs": {"beam_width": 4}}, "is not supported"),
    ("LoRA", {"prompt": "hi", "extra_inputs": {"lora_task_id": 1}}, "is not supported"),
    ("guided decoding", {"prompt": "hi", "extra_inputs": {"guided_decoding_guide_type": "json"}}, "is not"),
]


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Client]:
    """A client of the shared server, over each protocol, that never tries again."""
    with Client(server.grpc_url if request.param == "grpc" else server.http_url, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", ["ensemble", FRONT_DOOR])
@pytest.mark.parametrize(("fields", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_is_refused_with_field_and_limit(client: Client, model: str, fields: dict[str, Any], message: str) -> None:
    """The error names the field, the limit and the value, and the next request is served."""
    options = {"max_tokens": 4, **fields}
    with pytest.raises(EnginehouseError) as caught:
        client.generate(model=model, timeout_s=60, **options)

    assert message in str(caught.value)
    assert "`" in str(caught.value)
    assert client.generate("The capital of France is", max_tokens=2, model=model).text == " Paris."


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ([{"role": "robot", "content": "x"}], "must be one of system, user"),
        ([{"role": "user"}], 'must be an object with "role" and "content"'),
        ([{"role": "user", "content": 3}], "must be a text"),
    ],
)
def test_bad_messages_are_refused(client: Client, messages: list[dict[str, Any]], message: str) -> None:
    """Chat messages that are not such are refused with what is wrong and where."""
    with pytest.raises(InvalidRequestError) as caught:
        client.generate(messages=messages, max_tokens=4)

    assert message in str(caught.value)


def infer(server: RunningServer, model: str, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Send tensors as they are with tritonclient and raise what the server answers."""
    import queue  # noqa: PLC0415

    results: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        inputs = []
        for name, (data_type, array) in tensors.items():
            tensor = tritonclient.grpc.InferInput(name, array.shape, data_type)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer(model, inputs)
        _, error = results.get(timeout=60)
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": ("FP32", np.ones((1, 1), np.float32))}, "data-type"),
        ({"max_tokens": ("INT32", np.ones((1, 3), np.int32))}, "shape"),
        ({"no_such_tensor": ("INT32", np.ones((1, 1), np.int32))}, "no_such_tensor"),
        ({"text_input": ("BYTES", np.array([[b"\xff\xfe bad"]], np.object_))}, "not valid UTF-8 at byte 0"),
    ],
)
@pytest.mark.parametrize("model", ["ensemble", FRONT_DOOR])
def test_wrong_tensors_are_refused(
    server: RunningServer, model: str, changes: dict[str, tuple[str, np.ndarray]], message: str
) -> None:
    """A wrong type or shape, an unknown tensor and text that is not UTF-8 each get their error."""
    good = {
        "text_input": ("BYTES", np.array([[b"hi"]], np.object_)),
        "max_tokens": ("INT32", np.array([[4]], np.int32)),
    }
    with pytest.raises(InferenceServerException) as caught:
        infer(server, model, {**good, **changes})

    assert message in str(caught.value)


def test_http_without_a_required_input_is_refused(server: RunningServer) -> None:
    """Triton lets optional inputs make up for a missing one; the front door does not."""
    body = json.dumps({"max_tokens": 4, "seed": 1}).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/models/{FRONT_DOOR}/generate", body)  # noqa: S310 - local
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)  # noqa: S310 - our own server

    assert caught.value.code == 400
    assert "`text_input`" in json.loads(caught.value.read())["error"]
    caught.value.close()


def test_refusals_leave_no_memory_behind(server: RunningServer) -> None:
    """Hundreds of refused requests, large ones among them, do not make the server's processes grow."""
    with Client(server.http_url, max_retries=0) as client:

        def refuse(count: int) -> None:
            for number in range(count):
                with pytest.raises(EnginehouseError):
                    client.generate("x" * (1_000_000 if number % 10 == 0 else 10), top_p=2.0, max_tokens=4)

        refuse(60)
        before = resident_kib(server.state.pid)
        refuse(300)

    assert resident_kib(server.state.pid) - before < 60_000
