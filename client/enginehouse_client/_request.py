"""What a caller asks for, and how it becomes the front door's (or the ensemble's) tensors.

Types and shapes come from :mod:`enginehouse_contract.tensors`; this module only says which argument is which input.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypedDict

import numpy as np

from enginehouse_contract.errors import InvalidRequestError, refusal
from enginehouse_contract.tensors import MODELS, TENSORRT_LLM_BLS, ModelContract, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

FRONT_DOOR: Final = TENSORRT_LLM_BLS.name
"""The model that clients ask by default; ``ensemble`` is NVIDIA's."""

Message = Mapping[str, Any]
"""One chat message: ``role`` and ``content``, and whatever else the model's template reads."""


class GenerationOptions(TypedDict, total=False):
    """Everything beside the prompt; what is left out, or None, is the server's to choose."""

    max_tokens: int  # 128 unless given
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    min_tokens: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: Sequence[str]
    bad_words: Sequence[str]
    include_stop: bool | None  # keep the stop string in the text (front door)
    n: int  # sequences, 1 unless given
    return_log_probs: bool
    return_perf_metrics: bool
    exclude_prompt: bool  # True unless given
    tenant: str | None  # this and the following: front door
    priority: int | None
    timeout_ms: int | None  # the server's own time limit: what was generated until then is the answer
    speculate: str | None
    num_draft_tokens: int | None
    service: str | None  # one of the services that share the host's memory
    extra_inputs: Mapping[str, Any]  # other inputs of the model, by name


_DEFAULTS: Final[GenerationOptions] = {"max_tokens": 128, "n": 1, "exclude_prompt": True}
_INPUT_OF_OPTION: Final = {
    "stop": "stop_words",
    "n": "num_return_sequences",
    "exclude_prompt": "exclude_input_in_output",
}
_ONLY_WHEN_SET: Final = frozenset({"stop", "bad_words", "return_log_probs", "return_perf_metrics"})
_COUNT_FLAGS: Final = ("return_num_input_tokens", "return_num_output_tokens")

_NUMPY_TYPES: Final[dict[str, type[Any]]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}
_KINDS_THAT_FIT: Final = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, ready for either wire. ``arrays`` are the inputs by name, each [1, ...]."""

    model: str
    request_id: str
    is_streaming: bool
    arrays: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, str]

    @property
    def answers_once(self) -> bool:
        """Whether exactly one response comes: HTTP's plain ``/generate`` takes no other number."""
        return not self.is_streaming and int(self.arrays["num_return_sequences"].item()) == 1

    def tensor(self, name: str) -> Tensor:
        """Return the contract of one of the arrays."""
        return contract_of(self.model).input(name)


def contract_of(model: str) -> ModelContract:
    """Return a model's contract; a model of another name is taken for a front door."""
    return MODELS.get(model, TENSORRT_LLM_BLS)


def make_request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    options: GenerationOptions,
    *,
    model: str,
    request_id: str,
    stream: bool,
) -> GenerationRequest:
    """Build a request; raise :class:`InvalidRequestError` for what cannot be one, before anything is sent."""
    contract = contract_of(model)
    known = {tensor.name for tensor in contract.inputs}
    values: dict[str, Any] = {"stream": stream}
    if "messages" not in known:
        values.update(dict.fromkeys(_COUNT_FLAGS, True))  # the front door counts unasked
    prompt_values, parameters = _prompt(prompt, messages, takes_messages="messages" in known)
    values.update(prompt_values)
    for name, value in {**_DEFAULTS, **options}.items():
        if name not in GenerationOptions.__annotations__:
            raise InvalidRequestError(refusal(name, "is no option", hint=_did_you_mean(name)))
        if name != "extra_inputs" and value is not None and (value or name not in _ONLY_WHEN_SET):
            values[_INPUT_OF_OPTION.get(name, name)] = value
    values.update(options.get("extra_inputs", {}))
    for name in values:
        if name not in known:
            raise InvalidRequestError(refusal(name, f"is not an input of the model `{model}`"))
    arrays = {name: to_array(contract.input(name), value) for name, value in values.items()}
    return GenerationRequest(model, request_id, stream, arrays, parameters)


def make_probe(request_id: str) -> GenerationRequest:
    """Build the request that asks the front door whether its engine answers."""
    values = {"probe": True, "max_tokens": 1, "stream": False, "num_return_sequences": 1}
    arrays = {name: to_array(TENSORRT_LLM_BLS.input(name), value) for name, value in values.items()}
    return GenerationRequest(FRONT_DOOR, request_id, is_streaming=False, arrays=arrays, parameters={})


def _prompt(
    prompt: str | None, messages: Sequence[Message] | None, *, takes_messages: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the input that carries prompt or messages, and the request parameters it needs."""
    if (prompt is None) == (messages is None):
        raise InvalidRequestError(refusal("prompt", "or `messages` is required, and only one of them"))
    if messages is None:
        assert prompt is not None, "one of the two is given"
        return {"text_input": prompt}, {}
    try:
        text = json.dumps([dict(message) for message in messages])
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(refusal("messages", f"must be a list of JSON objects ({error})")) from error
    if takes_messages:
        return {"messages": text}, {}
    # NVIDIA's ensemble has no input for messages: our preprocessing reads this parameter instead.
    return {"text_input": text}, {"input_format": "messages"}


def _did_you_mean(name: str) -> str:
    nearest = difflib.get_close_matches(name, GenerationOptions.__annotations__, n=1)
    return f"Did you mean `{nearest[0]}`?" if nearest else ""


def to_array(tensor: Tensor, value: Any) -> NDArray[Any]:
    """Return a value as the tensor's array with the batch dimension, [1, ...].

    Raises :class:`InvalidRequestError` where the value is of another type or out of the type's range: nothing is
    rounded, wrapped or parsed in silence.
    """
    if tensor.data_type == "STRING":
        return _to_string_array(tensor, value)
    kind = np.dtype(_NUMPY_TYPES[tensor.data_type])
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.empty(0, np.object_)
    fits = array.dtype.kind in _KINDS_THAT_FIT[kind.kind]
    if fits and kind.kind in "iu" and array.size:
        bounds = np.iinfo(kind)
        fits = bounds.min <= int(array.min()) and int(array.max()) <= bounds.max
    if not fits:
        raise InvalidRequestError(refusal(tensor.name, f"does not fit its type {tensor.data_type}", given=value))
    with np.errstate(over="ignore"):  # a float too large becomes infinite, which the server refuses by name
        flat: NDArray[Any] = np.atleast_1d(array.astype(kind))
    return flat[np.newaxis]


def _to_string_array(tensor: Tensor, value: Any) -> NDArray[Any]:
    try:
        words = [value] if isinstance(value, (str, bytes)) else list(value)
        encoded = [word if isinstance(word, bytes) else word.encode() for word in words]
    except (TypeError, AttributeError):
        raise InvalidRequestError(refusal(tensor.name, "must be text", given=value)) from None
    except UnicodeEncodeError as error:
        raise InvalidRequestError(refusal(tensor.name, f"is not valid Unicode ({error.reason})")) from error
    array = np.empty((1, len(encoded)), np.object_)
    array[0, :] = encoded
    return array
