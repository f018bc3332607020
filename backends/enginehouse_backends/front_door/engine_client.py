"""One row's tokens from an engine model, as deltas: a plain streamed call.

Works on any engine that speaks the contract. Everything asked of the engine is asked under its own tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from enginehouse_contract.tensors import ENGINE_USAGE_NAMES, PERF_METRIC_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Tensors = Mapping[str, NDArray[Any]]

LOGITS_NAMES: Final = ("context_logits", "generation_logits")

_ENGINE_OUTPUTS: Final = (
    "output_ids",
    "sequence_length",
    "sequence_index",
    "cum_log_probs",
    "output_log_probs",
    *LOGITS_NAMES,
    *PERF_METRIC_NAMES,
    *ENGINE_USAGE_NAMES,
)


class CallEngine(Protocol):
    """Calls an engine model and yields the tensors of each response; blocks in ``next``; raises errors of our tree."""

    def __call__(
        self,
        model_name: str,
        inputs: Tensors,
        requested_outputs: Sequence[str],
        *,
        request_id: str,
        parameters: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Start the call."""
        ...


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """New tokens of one sequence. ``metrics`` come with its last response."""

    sequence_index: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float | None = None
    metrics: dict[str, NDArray[Any]] | None = None
    logits: dict[str, NDArray[Any]] = field(default_factory=dict)


def prompt_inputs(prompt_token_ids: Sequence[int], max_tokens: int) -> dict[str, NDArray[Any]]:
    """Return the engine's required inputs for one row."""
    return {
        "input_ids": np.array([prompt_token_ids], np.int32),
        "input_lengths": np.array([[len(prompt_token_ids)]], np.int32),
        "request_output_len": np.array([[max_tokens]], np.int32),
    }


def generate(
    call_engine: CallEngine,
    model_name: str,
    inputs: Tensors,
    *,
    request_id: str,
    parameters: Mapping[str, Any],
) -> Iterator[EngineDelta]:
    """Stream one row's deltas. *inputs* hold the prompt and the sampling values."""
    asked = {
        **inputs,
        "streaming": np.array([[True]]),
        "return_perf_metrics": np.array([[True]]),
    }
    responses = call_engine(model_name, asked, _ENGINE_OUTPUTS, request_id=request_id, parameters=parameters)
    for response in responses:
        yield read_delta(response)


def read_delta(response: Tensors) -> EngineDelta:
    """Read one streamed engine response (batch of one, one beam)."""
    length = int(response["sequence_length"].reshape(-1)[0])
    log_probs = response.get("output_log_probs")
    cum_log_prob = response.get("cum_log_probs")
    sequence_index = response.get("sequence_index")
    metrics = {name: response[name] for name in (*PERF_METRIC_NAMES, *ENGINE_USAGE_NAMES) if name in response}
    return EngineDelta(
        sequence_index=0 if sequence_index is None else int(sequence_index.reshape(-1)[0]),
        token_ids=tuple(response["output_ids"].reshape(-1)[:length].tolist()),
        log_probs=() if log_probs is None else tuple(log_probs.reshape(-1)[:length].tolist()),
        cum_log_prob=None if cum_log_prob is None else float(cum_log_prob.reshape(-1)[0]),
        metrics=metrics or None,
        logits={name: response[name] for name in LOGITS_NAMES if name in response},
    )


def stop_engine(call_engine: CallEngine, model_name: str, request_id: str) -> None:
    """Ask an engine to stop the request with this id; a request that is not in flight is ignored.

    Also the cheapest proof that an engine is alive: it answers at once, whatever else it does. Raises
    :class:`EngineUnavailableError` when nobody is there.
    """
    inputs = {**prompt_inputs((0,), 1), "stop": np.array([[True]])}
    for _ in call_engine(model_name, inputs, ("output_ids", "sequence_length"), request_id=request_id):
        pass
