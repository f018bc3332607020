"""Requests and answers on both wires, without a network."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from enginehouse_client._request import FRONT_DOOR, GenerationOptions, GenerationRequest, make_request
from enginehouse_client._results import GenerationChunk, Usage, join_chunks
from enginehouse_client._wire import EventParser, decode_http, encode_grpc, encode_http
from enginehouse_contract.errors import EngineFailureError, InvalidRequestError
from enginehouse_contract.tensors import ENSEMBLE, MODELS

ALL_OPTIONS: GenerationOptions = {
    "max_tokens": 9,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.25,
    "seed": 2**64 - 1,
    "min_tokens": 2,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "stop": ["a", "é"],
    "bad_words": ("b",),
    "n": 2,
    "return_log_probs": True,
    "return_perf_metrics": True,
}


def request_for(model: str = "ensemble", *, stream: bool = True, **options: Any) -> GenerationRequest:
    """A request with a prompt."""
    return make_request("hi", None, GenerationOptions(**options), model=model, request_id="r1", stream=stream)


@pytest.mark.parametrize("model", ["ensemble", FRONT_DOOR])
def test_grpc_inputs_are_the_contracts_tensors(model: str) -> None:
    """Every input has the contract's type, and a batch dimension before its shape."""
    message = encode_grpc(request_for(model, **ALL_OPTIONS))
    contract = MODELS[model]

    assert message.model_name == model
    assert message.id == "r1"
    assert len(message.inputs) == len(message.raw_input_contents) >= len(ALL_OPTIONS) + 2
    for tensor in message.inputs:
        expected = contract.input(tensor.name)
        assert tensor.datatype == ("BYTES" if expected.data_type == "STRING" else expected.data_type)
        assert tensor.shape[0] == 1
        assert len(tensor.shape) == 1 + len(expected.dims)
    by_name = {tensor.name: raw for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)}
    assert np.frombuffer(by_name["seed"], np.uint64).tolist() == [2**64 - 1]
    assert by_name["stop_words"] == b"\x01\x00\x00\x00a\x02\x00\x00\x00\xc3\xa9"


def test_http_body_has_scalars_and_flat_lists() -> None:
    """Inputs of one value are scalars, others flat lists; the server shapes them."""
    body = json.loads(encode_http(request_for(**ALL_OPTIONS)))

    assert body["id"] == "r1"
    assert body["max_tokens"] == 9
    assert body["seed"] == 2**64 - 1
    assert body["stop_words"] == ["a", "é"]
    assert body["bad_words"] == ["b"]
    assert body["exclude_input_in_output"] is True
    assert body["stream"] is True


def test_what_is_not_given_is_not_sent() -> None:
    """Defaults are the server's to choose."""
    sent = set(request_for(FRONT_DOOR, temperature=None, stop=[], return_log_probs=False).arrays)

    assert sent == {"text_input", "max_tokens", "num_return_sequences", "exclude_input_in_output", "stream"}


def test_messages_have_one_place() -> None:
    """The front door has an input for messages; the ensemble gets them as text and is told so."""
    messages = [{"role": "user", "content": "hé"}]
    front = make_request(None, messages, {}, model=FRONT_DOOR, request_id="", stream=True)
    ensemble = make_request(None, messages, {}, model="ensemble", request_id="", stream=True)

    assert json.loads(front.arrays["messages"].item()) == messages
    assert "text_input" not in front.arrays
    assert json.loads(ensemble.arrays["text_input"].item()) == messages
    assert encode_grpc(ensemble).parameters["input_format"].string_param == "messages"
    assert json.loads(encode_http(ensemble))["parameters"] == {"input_format": "messages"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 3.7}, "`max_tokens` does not fit its type INT32; given 3.7."),
        ({"max_tokens": "5"}, "`max_tokens` does not fit its type INT32; given 5."),
        ({"max_tokens": True}, "`max_tokens` does not fit its type INT32; given True."),
        ({"max_tokens": 2**31}, "`max_tokens` does not fit its type INT32; given 2147483648."),
        ({"seed": -1}, "`seed` does not fit its type UINT64; given -1."),
        ({"seed": 2**64}, "`seed` does not fit its type UINT64; given 18446744073709551616."),
        ({"temperature": "hot"}, "`temperature` does not fit its type FP32; given hot."),
        ({"stop": ["a", 1]}, "`stop_words` must be text; given ['a', 1]."),
        ({"stop": ["\ud800"]}, "`stop_words` is not valid Unicode (surrogates not allowed)."),
        ({"top_kk": 1}, "`top_kk` is no option. Did you mean `top_k`?"),
        ({"tenant": "acme"}, "`tenant` is not an input of the model `ensemble`."),
        ({"extra_inputs": {"colour": 1}}, "`colour` is not an input of the model `ensemble`."),
        ({"extra_inputs": {"lora_weights": [[1.0], [1.0, 2.0]]}}, "`lora_weights` does not fit its type FP16"),
    ],
)
def test_values_that_do_not_fit_are_refused_before_anything_is_sent(options: dict[str, Any], message: str) -> None:
    """Nothing is rounded, wrapped around or parsed in silence, whatever the protocol."""
    with pytest.raises(InvalidRequestError) as refused:
        request_for(**options)

    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("messages", [None, [{"role": "user", "content": "x"}]])
def test_exactly_one_of_prompt_and_messages(messages: list[dict[str, str]] | None) -> None:
    """Neither and both are refused."""
    with pytest.raises(InvalidRequestError, match="`prompt` or `messages`"):
        make_request("hi" if messages else None, messages, {}, model="ensemble", request_id="", stream=True)


def test_messages_must_be_json() -> None:
    """What JSON cannot carry is refused by name."""
    with pytest.raises(InvalidRequestError, match="`messages` must be a list of JSON objects"):
        make_request(None, [{"role": object()}], {}, model="ensemble", request_id="", stream=True)


@pytest.mark.parametrize("options", [{"temperature": float("nan")}, {"temperature": 1e39}, {"stop": [b"\xff"]}])
def test_what_json_cannot_carry_is_refused_over_http(options: dict[str, Any]) -> None:
    """Not a number, infinity and bytes that are no UTF-8: refused with the field, not sent as broken JSON."""
    with pytest.raises(InvalidRequestError, match=r"must be .* over HTTP"):
        encode_http(request_for(**options))


def test_extra_inputs_keep_their_shape() -> None:
    """Arrays of several dimensions get a batch dimension and nothing else."""
    request = request_for(extra_inputs={"lora_weights": np.ones((2, 3)), "lora_config": [[1, 2, 3]], "lora_task_id": 7})

    assert request.arrays["lora_weights"].shape == (1, 2, 3)
    assert request.arrays["lora_weights"].dtype == np.float16
    assert request.arrays["lora_config"].shape == (1, 1, 3)
    assert request.arrays["lora_task_id"].shape == (1, 1)
    assert json.loads(encode_http(request))["lora_config"] == [1, 2, 3]


def test_every_option_is_an_input_of_the_front_door() -> None:
    """No option is ignored: each becomes an input of the contract."""
    values = {**ALL_OPTIONS, "include_stop": True, "exclude_prompt": False, "tenant": "t", "priority": 1}
    values |= {"timeout_ms": 5, "speculate": "off", "num_draft_tokens": 2, "service": "s"}
    assert set(values) == set(GenerationOptions.__annotations__) - {"extra_inputs"}

    sent = request_for(FRONT_DOOR, **values).arrays

    assert len(sent) == len(values) + 2


@pytest.mark.parametrize("seed", range(20))
def test_events_are_the_same_wherever_the_pieces_are_cut(seed: int) -> None:
    """Server-sent events survive any cutting: inside characters, line ends and field names."""
    rng = random.Random(seed)
    texts = ["", "plain", "é漢🎉", 'quote " and \\n', "data: inside", "x" * 300]
    events = [json.dumps({"text_output": rng.choice(texts)}, ensure_ascii=rng.random() < 0.5) for _ in range(8)]
    end = rng.choice(["\n", "\r\n"])
    colon = rng.choice(["data: ", "data:"])
    raw = "".join(f": comment{end}{colon}{event}{end}{end}" for event in events).encode()
    parser, found, position = EventParser(), [], 0
    while position < len(raw):
        size = rng.choice([1, 1, 2, 3, 7, 100])
        found += parser.push(raw[position : position + size])
        position += size

    assert [event.decode() for event in found] == events
    assert not parser.is_inside_event


def test_an_event_of_several_lines_is_joined() -> None:
    """As the standard says; blank lines without data are no events."""
    parser = EventParser()

    assert list(parser.push(b"\n\ndata: a\ndata: b\n\n\n\ndata: c")) == [b"a\nb"]
    assert parser.is_inside_event


@pytest.mark.parametrize(
    ("text", "status", "expected", "message"),
    [
        ('{"error": "`top_p` is bad."}', 400, InvalidRequestError, "`top_p` is bad."),
        ('{"error": "odd"}', 200, EngineFailureError, "odd"),
        ("<html>", 200, EngineFailureError, "is not JSON"),
        ("<html>", 404, InvalidRequestError, "is not JSON"),
        ("[1]", 200, EngineFailureError, "is not an object"),
        ("{}", 404, InvalidRequestError, "HTTP 404"),
    ],
)
def test_http_answers_that_are_none(text: str, status: int, expected: type[Exception], message: str) -> None:
    """Errors and garbage have a type and say what came."""
    with pytest.raises(expected, match=message):
        decode_http(text, status)


def test_a_sequences_pieces_add_up() -> None:
    """Texts and log probabilities are joined, counts of pieces added, sequences ordered."""
    chunks = [
        GenerationChunk("b", 1, log_probs=(-2.0,), usage=Usage(3, None, 1)),
        GenerationChunk("a", 0, log_probs=(-1.0,), usage=Usage(3, None, 1)),
        GenerationChunk("c", 0, "stop", log_probs=(-0.5,), cum_log_prob=-1.5, usage=Usage(None, 2, 1), build_id="x"),
    ]
    result = join_chunks(chunks)

    assert [sequence.text for sequence in result.sequences] == ["ac", "b"]
    assert result.sequences[0].log_probs == (-1.0, -0.5)
    assert result.usage == Usage(3, 2, 2)
    assert result.finish_reason == "stop"
    assert result.build_id == "x"
    assert join_chunks([]).text == ""


def test_outputs_that_are_read_are_in_the_contract() -> None:
    """The client reads no output that no model has."""
    outputs = {tensor.name for model in (ENSEMBLE, MODELS[FRONT_DOOR]) for tensor in model.outputs}
    read = {"text_output", "sequence_index", "finish_reason", "stop_reason", "output_log_probs", "cum_log_probs"}
    read |= {"num_input_tokens", "num_cached_input_tokens", "num_output_tokens", "request_id", "build_id"}

    assert read <= outputs
