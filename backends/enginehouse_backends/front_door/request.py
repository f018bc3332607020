"""From the front door's tensors to what it will do: parsed once, before anything is queued or started.

Sampling values are handed to the engine as they are, under its own names; the engine is where they are checked, and its
refusals come back with the names the client used (:func:`client_wording`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast, get_args

import numpy as np

from enginehouse_backends.accounting.records import MAX_NAME_BYTES
from enginehouse_backends.tokenization.word_lists import MAX_WORD_BYTES, MAX_WORDS
from enginehouse_backends.triton.row_reader import RowReader
from enginehouse_contract.errors import InvalidRequestError, UnsupportedFeatureError, refusal
from enginehouse_contract.tensors import ENSEMBLE, TENSORRT_LLM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

SpeculateMode = Literal["off", "ngram", "draft"]
_SPECULATE_MODES: Final = get_args(SpeculateMode)

TENANT_HEADERS: Final = ("x-tenant-id", "x-enginehouse-tenant")
"""Forwarded headers that name the tenant; a trusted header wins over the request's own `tenant`."""

KEY_HEADERS: Final = ("x-enginehouse-key",)
"""Forwarded headers that name the tenant's API key, for budgets by key."""

TRACE_HEADERS: Final = ("traceparent",)
"""W3C trace context: the span of a request continues it."""

DEFAULT_TENANT: Final = "default"
_MAX_TIMEOUT_MS: Final = 24 * 3600 * 1000

_REFUSED_INPUTS: Final = {
    "image_input": "image input is not served",
    "image_bytes_input": "image input is not served",
    "image_url_input": "image input is not served",
    "video_bytes_input": "video input is not served",
    "decoder_text_input": "encoder-decoder models are not served",
}

ENGINE_NAMES: Final = {
    front_name: engine_name
    for step in ENSEMBLE.steps
    if step.model == "tensorrt_llm"
    for engine_name, front_name in step.inputs.items()
    if not front_name.startswith("_")
}
"""Front door input -> the engine's name for the same value, from the ensemble's own wiring."""

_OWN_BUSINESS: Final = frozenset({"stream", "exclude_input_in_output", "return_perf_metrics", "end_id"})
"""Inputs that the front door acts on itself instead of handing them on."""


@dataclass(frozen=True, slots=True)
class FrontRow:
    """One row of a request to the front door."""

    text: str | None
    messages: str | None
    max_tokens: int
    num_sequences: int
    is_streaming: bool
    exclude_input: bool
    wants_log_probs: bool
    wants_perf_metrics: bool
    stop_words: tuple[str, ...]
    min_tokens: int
    include_stop: bool
    bad_words: tuple[str, ...]
    bias_words: tuple[str, ...]
    bias_weights: tuple[float, ...]
    end_id: int | None
    num_draft_tokens: int | None
    use_draft_logits: bool
    speculate: SpeculateMode | None
    tenant: str
    key_id: str
    trace_parent: str
    priority: int
    timeout_s: float | None
    service: str | None
    engine_inputs: Mapping[str, NDArray[Any]]  # under the engine's names, batch of one


def is_probe(inputs: Mapping[str, NDArray[Any]]) -> bool:
    """Whether a request only asks if the engine answers."""
    return "probe" in inputs and bool(np.asarray(inputs["probe"]).any())


def parse_front_request(inputs: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]) -> list[FrontRow]:
    """Turn one Triton request into its rows; raise :class:`InvalidRequestError` unless every row is good."""
    for name, reason in _REFUSED_INPUTS.items():
        if name in inputs:
            raise UnsupportedFeatureError(refusal(name, f"is not supported: {reason}", hint="Leave it out."))
    num_rows = next(iter(inputs.values())).shape[0] if inputs else 0
    for name, array in inputs.items():
        if array.shape[0] != num_rows:
            raise InvalidRequestError(refusal(name, "has another batch size than the others", limit=num_rows))
    caller = _Caller(
        _trusted_name(parameters, TENANT_HEADERS),
        _trusted_name(parameters, KEY_HEADERS) or "",
        _trusted_name(parameters, TRACE_HEADERS) or "",
    )
    return [_parse_row(RowReader(inputs, index), inputs, index, caller) for index in range(num_rows)]


def client_wording(message: str) -> str:
    """Put the client's names into an engine's refusal: `runtime_top_p` was sent as `top_p`."""
    engine_to_front = {engine: front for front, engine in ENGINE_NAMES.items()} | {
        "request_output_len": "max_tokens",
        "input_ids": "text_input",
    }
    return re.sub(r"`(\w+)`", lambda match: f"`{engine_to_front.get(match[1], match[1])}`", message)


class _Caller(NamedTuple):
    """Who asks, by headers that the server forwards."""

    tenant: str | None
    key_id: str
    trace_parent: str


def _trusted_name(parameters: Mapping[str, Any], headers: Sequence[str]) -> str | None:
    """A forwarded header; its spelling is the client's over HTTP and lower case over gRPC."""
    for name, value in parameters.items():
        if name.lower() in headers:
            return _check_name(name.lower(), str(value))
    return None


def _check_name(field: str, name: str) -> str:
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 0 < size <= MAX_NAME_BYTES:
        raise InvalidRequestError(refusal(field, "has a bad length", limit=f"{MAX_NAME_BYTES} bytes", given=size))
    if not name.isprintable():
        raise InvalidRequestError(refusal(field, "holds control characters", given=repr(name)))
    return name


def _parse_row(row: RowReader, inputs: Mapping[str, NDArray[Any]], index: int, caller: _Caller) -> FrontRow:
    text, messages = row.text("text_input"), row.text("messages")
    if (text is None) == (messages is None):
        problem = "and `messages` exclude each other" if text is not None else "or `messages` is required"
        raise InvalidRequestError(refusal("text_input", problem))
    max_tokens = row.integer("max_tokens", 0, 1)
    if max_tokens == 0:
        raise InvalidRequestError(refusal("max_tokens", "is required and was not sent"))
    stop_words = _words(row, "stop_words")
    bias_words = tuple(row.texts("embedding_bias_words"))
    weights = row.array("embedding_bias_weights")
    bias_weights = () if weights is None else tuple(weights.reshape(-1).tolist())
    if len(bias_words) != len(bias_weights):
        msg = refusal("embedding_bias_words", "and `embedding_bias_weights` must be sent together, one weight per word")
        raise InvalidRequestError(msg)
    timeout_ms = row.integer("timeout_ms", 0, 0, _MAX_TIMEOUT_MS)
    end_id = row.integer("end_id", -2, -1)
    return FrontRow(
        text=text,
        messages=messages,
        max_tokens=max_tokens,
        num_sequences=max(1, row.integer("num_return_sequences", 1, 0)),
        is_streaming=row.flag("stream"),
        exclude_input=row.flag("exclude_input_in_output"),
        wants_log_probs=row.flag("return_log_probs"),
        wants_perf_metrics=row.flag("return_perf_metrics"),
        stop_words=stop_words,
        min_tokens=int(row.renamed("min_length")[1] or 0),
        include_stop=row.flag("include_stop"),
        bad_words=_words(row, "bad_words"),
        bias_words=bias_words,
        bias_weights=bias_weights,
        end_id=None if end_id == -2 else end_id,  # noqa: PLR2004 - outside the contract's range: was not sent
        num_draft_tokens=row.integer("num_draft_tokens", 0, 0) if row.scalar("num_draft_tokens") is not None else None,
        use_draft_logits=row.flag("use_draft_logits"),
        speculate=_speculate(row),
        tenant=caller.tenant or _check_name("tenant", row.text("tenant") or DEFAULT_TENANT),
        key_id=caller.key_id,
        trace_parent=caller.trace_parent,
        priority=row.integer("priority", 0, 0),
        timeout_s=timeout_ms / 1000 if timeout_ms else None,
        service=row.text("service") or None,
        engine_inputs={
            ENGINE_NAMES[name]: _as_sent(ENGINE_NAMES[name], array[index])
            for name, array in inputs.items()
            if name in ENGINE_NAMES and name not in _OWN_BUSINESS
        },
    )


def _as_sent(engine_name: str, value: NDArray[Any]) -> NDArray[Any]:
    """A row's value in the shape that the engine's clients send: with a batch dimension, scalars as [1, 1]."""
    value = np.asarray(value)
    return value.reshape(1, 1) if TENSORRT_LLM.input(engine_name).dims == (1,) else value[None]


def _words(row: RowReader, name: str) -> tuple[str, ...]:
    words = tuple(word for word in row.texts(name) if word)
    if len(words) > MAX_WORDS:
        raise InvalidRequestError(refusal(name, "holds too many words", limit=MAX_WORDS, given=len(words)))
    if (size := sum(len(word.encode()) for word in words)) > MAX_WORD_BYTES:
        raise InvalidRequestError(refusal(name, "is too long", limit=f"{MAX_WORD_BYTES} bytes", given=f"{size} bytes"))
    return words


def _speculate(row: RowReader) -> SpeculateMode | None:
    value = row.text("speculate")
    if value is None:
        return None
    if value in _SPECULATE_MODES:
        return cast("SpeculateMode", value)
    raise InvalidRequestError(refusal("speculate", "must be off, ngram or draft", given=value))
