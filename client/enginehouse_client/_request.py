"""What a caller asks for, and how it becomes the front door's (or the ensemble's) tensors.

Types and shapes come from :mod:`enginehouse_contract.tensors`; this module only says which argument is which input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from enginehouse_contract.errors import InvalidRequestError, refusal
from enginehouse_contract.tensors import MODELS, Tensor

FRONT_DOOR: Final = "tensorrt_llm_bls"
Message = Mapping[str, str]

NUMPY_TYPES: Final[dict[str, type[Any]]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Everything beside the prompt; ``None`` leaves the choice to the server. The names are the front door's inputs."""

    max_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    include_stop: bool | None = None
    n: int = 1
    return_log_probs: bool = False
    return_perf_metrics: bool = False
    exclude_prompt: bool = True
    tenant: str | None = None
    priority: int | None = None
    timeout_ms: int | None = None
    speculate: str | None = None
    num_draft_tokens: int | None = None
    extra_inputs: Mapping[str, Any] = field(default_factory=dict)  # other inputs of the model, by name


_INPUT_OF_OPTION: Final = {
    "stop": "stop_words",
    "n": "num_return_sequences",
    "exclude_prompt": "exclude_input_in_output",
}
_ONLY_WHEN_SET: Final = frozenset({"stop", "bad_words", "return_log_probs", "return_perf_metrics"})


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, ready for either wire: ``values`` by input name, each with its contract tensor."""

    model: str
    request_id: str
    is_streaming: bool
    values: Mapping[str, Any]
    parameters: Mapping[str, str]

    @property
    def answers_once(self) -> bool:
        """Whether exactly one response comes: HTTP's plain `/generate` takes no other number."""
        return not self.is_streaming and self.values.get("num_return_sequences", 1) == 1

    def tensor(self, name: str) -> Tensor:
        """Return the contract of one of the values."""
        return MODELS[self.model].input(name) if self.model in MODELS else MODELS[FRONT_DOOR].input(name)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return one value as an array with the batch dimension, [1, ...]."""
        tensor, value = self.tensor(name), self.values[name]
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if tensor.data_type == "STRING":
            return np.array([[item if isinstance(item, bytes) else item.encode() for item in items]], np.object_)
        try:
            return np.array([items], NUMPY_TYPES[tensor.data_type])
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequestError(refusal(name, f"is no {tensor.data_type} ({error})", given=value)) from error


def make_request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    options: GenerationOptions,
    *,
    model: str,
    request_id: str,
    stream: bool,
) -> GenerationRequest:
    """Build a request; raise :class:`InvalidRequestError` unless exactly one of *prompt* and *messages* is given."""
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("give either a prompt or messages, not both and not neither.")
    values: dict[str, Any] = {"stream": stream}
    parameters: dict[str, str] = {}
    if messages is None:
        values["text_input"] = prompt
    elif model == FRONT_DOOR:
        values["messages"] = json.dumps(list(map(dict, messages)))
    else:
        # NVIDIA's ensemble has no input for messages: our preprocessing reads this parameter instead.
        values["text_input"] = json.dumps(list(map(dict, messages)))
        parameters["input_format"] = "messages"
    for name in GenerationOptions.__dataclass_fields__:
        value = getattr(options, name)
        if name == "extra_inputs" or value is None or (name in _ONLY_WHEN_SET and not value):
            continue
        values[_INPUT_OF_OPTION.get(name, name)] = list(value) if isinstance(value, tuple) else value
    values.update(options.extra_inputs)
    _check_names(values, model)
    return GenerationRequest(model, request_id, stream, values, parameters)


def _check_names(values: Mapping[str, Any], model: str) -> None:
    if model not in MODELS:
        return
    known = {tensor.name for tensor in MODELS[model].inputs}
    for name in values:
        if name not in known:
            raise InvalidRequestError(refusal(name, f"is not an input of the model `{model}`"))
