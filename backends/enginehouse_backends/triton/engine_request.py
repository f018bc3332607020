"""From the engine model's tensors to generation requests: parsed once, refused by name, never half-accepted.

Pure functions over arrays, so that every rule is tested without a server. Semantics follow NVIDIA's
``inflight_batcher_llm`` (TensorRT-LLM 1.2.1, ``utils.cc`` and ``model_instance_state.cc``): ``input_ids`` is cut to
``input_lengths``; a non-positive ``runtime_top_p`` and a zero ``runtime_top_k`` mean "unset"; with neither, decoding is
greedy; zero beams or sequences mean one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_backends.engine.request import GenerationRequest, RequestId, SamplingParams
from enginehouse_backends.tokenization.word_lists import decode_word_list
from enginehouse_backends.triton.row_reader import RowReader
from enginehouse_contract.errors import InvalidRequestError, UnsupportedFeatureError, refusal
from enginehouse_contract.support import REFUSED_INPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import TokenIds

PRIORITY_PARAMETER = "request_priority"
"""Request parameter with the priority (1 = highest, 0 = default): Python models cannot read Triton's own."""


SPECULATE_PARAMETER = "speculate"
"""Request parameter: `ngram` or `off` for drafting by prompt lookup; unset, as the model is set."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the loaded engine can hold; a request beyond it is refused with these numbers."""

    vocab_size: int
    max_input_len: int
    max_seq_len: int
    max_batch_size: int
    exclude_input_in_output: bool = False  # the model parameter; a request's tensor overrides it


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What the responses of one row carry beside its tokens."""

    streaming: bool
    exclude_input: bool
    log_probs: bool
    perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One row of a batched Triton request: the generation request and how to report it."""

    generation: GenerationRequest
    report: ReportOptions


def is_stop_request(inputs: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether the request only asks to stop the request in flight under its id."""
    stop = inputs.get("stop")
    return stop is not None and bool(stop.reshape(-1)[:1].any())


def parse_engine_request(
    inputs: Mapping[str, NDArray[Any]],
    parameters: Mapping[str, Any],
    limits: RequestLimits,
    *,
    request_id: str,
    arrival_time_ns: int,
) -> list[EngineRow]:
    """Turn one Triton request into its rows.

    Raises :class:`UnsupportedFeatureError` for an input this engine refuses by name and :class:`InvalidRequestError`
    for a value out of its limits; nothing is started unless every row is good.
    """
    for name in inputs:
        if name in REFUSED_INPUTS:
            raise UnsupportedFeatureError(
                refusal(name, f"is not supported: {REFUSED_INPUTS[name]}", hint="Leave it out.")
            )
    if "input_ids" not in inputs:
        raise InvalidRequestError(refusal("input_ids", "is required and was not sent"))
    num_rows = inputs["input_ids"].shape[0]
    for name, array in inputs.items():
        if array.shape[0] != num_rows:
            raise InvalidRequestError(
                refusal(name, "has another batch size than `input_ids`", limit=num_rows, given=array.shape[0])
            )
    if num_rows > limits.max_batch_size:
        raise InvalidRequestError(
            refusal("input_ids", "has too many rows", limit=limits.max_batch_size, given=num_rows)
        )
    priority = _priority(parameters)
    speculate_ngram = _speculate_ngram(parameters)
    return [
        _parse_row(
            RowReader(inputs, row),
            limits,
            request_id=RequestId(f"{request_id}/{row}"),
            priority=priority,
            speculate_ngram=speculate_ngram,
            arrival_time_ns=arrival_time_ns,
        )
        for row in range(num_rows)
    ]


def _priority(parameters: Mapping[str, Any]) -> int:
    value = parameters.get(PRIORITY_PARAMETER, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequestError(
            refusal(PRIORITY_PARAMETER, "must be an integer from 0 (default), 1 (highest) on", given=value)
        )
    return value


def _speculate_ngram(parameters: Mapping[str, Any]) -> bool | None:
    value = parameters.get(SPECULATE_PARAMETER)
    if value is None:
        return None
    if value not in {"off", "ngram"}:
        raise InvalidRequestError(refusal(SPECULATE_PARAMETER, "must be off or ngram", given=value))
    return bool(value == "ngram")


def _parse_row(
    row: RowReader,
    limits: RequestLimits,
    *,
    request_id: RequestId,
    priority: int,
    speculate_ngram: bool | None,
    arrival_time_ns: int,
) -> EngineRow:
    prompt = _prompt(row, limits)
    max_new_tokens = row.integer("request_output_len", 0, 1)
    if max_new_tokens == 0:
        raise InvalidRequestError(refusal("request_output_len", "is required and was not sent"))
    if len(prompt) + max_new_tokens > limits.max_seq_len:
        msg = refusal(
            "request_output_len",
            f"does not fit: a prompt of {len(prompt)} tokens leaves room for {limits.max_seq_len - len(prompt)} more",
            limit=limits.max_seq_len,
            given=max_new_tokens,
            hint="Shorten the prompt or ask for fewer tokens.",
        )
        raise InvalidRequestError(msg)
    if row.integer("beam_width", 1, 0) > 1:
        msg = refusal(
            "beam_width",
            "above 1 is not supported: the CPU engine does not search beams",
            given=row.scalar("beam_width"),
        )
        raise UnsupportedFeatureError(msg)
    min_name, min_tokens = row.renamed("min_length")
    if min_tokens is not None and not 0 <= min_tokens <= max_new_tokens:
        msg = refusal(min_name, "must be from 0 to `request_output_len`", limit=max_new_tokens, given=min_tokens)
        raise InvalidRequestError(msg)
    report = ReportOptions(
        streaming=row.flag("streaming"),
        exclude_input=row.flag("exclude_input_in_output", default=limits.exclude_input_in_output),
        log_probs=row.flag("return_log_probs"),
        perf_metrics=row.flag("return_perf_metrics"),
        num_input_tokens=row.flag("return_num_input_tokens"),
        num_output_tokens=row.flag("return_num_output_tokens"),
    )
    generation = GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        max_new_tokens=max_new_tokens,
        min_new_tokens=int(min_tokens or 0),
        sampling=_sampling(row, limits),
        end_id=_token_id(row, "end_id", limits),
        stop_words=_words(row, "stop_words_list", limits),
        bad_words=_words(row, "bad_words_list", limits),
        num_return_sequences=max(1, row.integer("num_return_sequences", 1, 0, limits.max_batch_size)),
        priority=priority,
        **_drafts(row, limits, max_new_tokens),
        speculate_ngram=speculate_ngram,
        arrival_time_ns=arrival_time_ns,
        return_log_probs=report.log_probs,
        return_context_logits=row.flag("return_context_logits"),
        return_generation_logits=row.flag("return_generation_logits"),
    )
    return EngineRow(generation, report)


def _prompt(row: RowReader, limits: RequestLimits) -> TokenIds:
    ids = row.array("input_ids")
    length = row.integer("input_lengths", -1, 0)
    if length < 0:
        raise InvalidRequestError(refusal("input_lengths", "is required and was not sent"))
    num_ids = 0 if ids is None else ids.size
    if ids is None or length == 0:
        raise InvalidRequestError(refusal("input_ids", "is empty; a prompt needs at least one token"))
    if length > num_ids:
        raise InvalidRequestError(
            refusal("input_lengths", "is larger than `input_ids` is long", limit=num_ids, given=length)
        )
    if length > limits.max_input_len:
        msg = refusal(
            "input_ids",
            "is too long",
            limit=f"{limits.max_input_len} tokens",
            given=f"{length} tokens",
            hint="Shorten the prompt.",
        )
        raise InvalidRequestError(msg)
    ids = ids.reshape(-1)[:length]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocab_size:
        given = low if low < 0 else high
        raise InvalidRequestError(
            refusal(
                "input_ids", "holds an id outside the vocabulary", limit=f"0 to {limits.vocab_size - 1}", given=given
            )
        )
    return tuple(ids.tolist())


def _drafts(row: RowReader, limits: RequestLimits, max_new_tokens: int) -> dict[str, Any]:
    """The fields of a request whose first tokens were guessed elsewhere; TensorRT-LLM's external drafts."""
    ids, logits = row.array("draft_input_ids"), row.array("draft_logits")
    if ids is None:
        if logits is not None:
            raise InvalidRequestError(refusal("draft_logits", "came without `draft_input_ids`"))
        return {}
    if row.integer("num_return_sequences", 1, 0) > 1:
        raise UnsupportedFeatureError(refusal("draft_input_ids", "cannot be shared by several sequences"))
    if ids.size >= max_new_tokens:
        msg = refusal("draft_input_ids", "leaves no token to generate", limit=max_new_tokens - 1, given=ids.size)
        raise InvalidRequestError(msg)
    drafts = ids.reshape(-1)
    if int(drafts.min()) < 0 or int(drafts.max()) >= limits.vocab_size:
        raise InvalidRequestError(refusal("draft_input_ids", "holds an id outside the vocabulary"))
    if logits is not None and logits.shape != (drafts.size, limits.vocab_size):
        expected = [drafts.size, limits.vocab_size]
        raise InvalidRequestError(
            refusal("draft_logits", "has a wrong shape", limit=expected, given=list(logits.shape))
        )
    has_threshold = row.scalar("draft_acceptance_threshold") is not None
    return {
        "draft_token_ids": tuple(drafts.tolist()),
        "draft_logits": None if logits is None else logits.astype(np.float32),
        "draft_acceptance_threshold": (
            row.number("draft_acceptance_threshold", 0.0, 0.0, 1.0) if has_threshold else None
        ),
    }


def _sampling(row: RowReader, limits: RequestLimits) -> SamplingParams:
    top_k = row.integer("runtime_top_k", 0, 0)
    top_p = row.number("runtime_top_p", 0.0, -math.inf, 1.0)
    is_unset = top_k == 0 and top_p <= 0.0
    _, seed = row.renamed("random_seed")
    return SamplingParams(
        top_k=1 if is_unset else top_k,
        top_p=top_p if top_p > 0.0 else 1.0,
        top_p_min=row.number("runtime_top_p_min", 1e-6, 0.0, 1.0),
        top_p_decay=row.number("runtime_top_p_decay", 1.0, 0.0, 1.0),
        top_p_reset_id=_token_id(row, "runtime_top_p_reset_ids", limits),
        temperature=row.number("temperature", 1.0, 0.0),
        repetition_penalty=_repetition_penalty(row),
        presence_penalty=row.number("presence_penalty", 0.0, -100.0, 100.0),
        frequency_penalty=row.number("frequency_penalty", 0.0, -100.0, 100.0),
        seed=None if seed is None else int(seed),
        embedding_bias=_embedding_bias(row, limits),
    )


def _repetition_penalty(row: RowReader) -> float:
    value = row.number("repetition_penalty", 1.0, 0.0)
    if value == 0.0:
        raise InvalidRequestError(refusal("repetition_penalty", "must be above 0 (1 = off)", given=value))
    return value


def _embedding_bias(row: RowReader, limits: RequestLimits) -> NDArray[np.float32] | None:
    bias = row.array("embedding_bias")
    if bias is None or not bias.any():
        return None
    bias = bias.reshape(-1)
    if bias.size != limits.vocab_size:
        raise InvalidRequestError(
            refusal(
                "embedding_bias", "must hold one number per vocabulary entry", limit=limits.vocab_size, given=bias.size
            )
        )
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise InvalidRequestError(refusal("embedding_bias", "holds NaN or infinity"))
    return bias.astype(np.float32)


def _token_id(row: RowReader, name: str, limits: RequestLimits) -> int | None:
    """A token id, or None for -1 and for an input that was not sent."""
    value = row.integer(name, -1, -1, limits.vocab_size - 1)
    return None if value < 0 else value


def _words(row: RowReader, name: str, limits: RequestLimits) -> tuple[TokenIds, ...]:
    words = row.array(name)
    return () if words is None else decode_word_list(words, name, limits.vocab_size)
