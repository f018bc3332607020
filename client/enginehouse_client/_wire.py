"""Requests and responses on the two wires, without any input or output.

gRPC: ModelStreamInfer, one stream per request. HTTP: Triton's generate extension, JSON in and server-sent events out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from enginehouse_client._errors import error_of_http_status, error_of_message
from enginehouse_client._results import GenerationChunk, ModelState, make_chunk
from enginehouse_contract.errors import EngineFailureError, InvalidRequestError, refusal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from enginehouse_client._request import GenerationRequest

HTTP_OK: Final = 200


def encode_grpc(request: GenerationRequest) -> Any:
    """Return the ModelInferRequest message."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    for name, array in request.arrays.items():
        is_string = request.tensor(name).data_type == "STRING"
        tensor = message.inputs.add(name=name, datatype="BYTES" if is_string else request.tensor(name).data_type)
        tensor.shape.extend(array.shape)
        message.raw_input_contents.append(serialize_byte_tensor(array).item() if is_string else array.tobytes())
    for name, value in request.parameters.items():
        message.parameters[name].string_param = value
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def decode_grpc(message: Any) -> tuple[GenerationChunk | None, bool]:
    """Read one stream response: its data, if it has any, and whether it is the final one.

    The final flag may come on a data response or on an empty one. Raises the server's error.
    """
    if message.error_message:
        raise error_of_message(message.error_message)
    response = message.infer_response
    is_final = bool(response.parameters["triton_final_response"].bool_param)
    if not response.outputs:
        return None, is_final
    try:
        pairs = zip(response.outputs, response.raw_output_contents, strict=True)
        outputs = {tensor.name: _decode_tensor(tensor.datatype, raw) for tensor, raw in pairs}
    except (ValueError, TypeError, KeyError) as error:
        raise EngineFailureError(f"the server's answer cannot be read ({error}).") from error
    return make_chunk(outputs), is_final


def _decode_tensor(data_type: str, raw: bytes) -> list[Any]:
    if data_type == "BYTES":
        return [value.decode("utf-8", "replace") for value in deserialize_bytes_tensor(raw)]
    kind = triton_to_np_dtype(data_type)
    if kind is None:
        raise TypeError(f"unknown data type {data_type}")
    values: list[Any] = np.frombuffer(raw, kind).tolist()
    return values


def encode_http(request: GenerationRequest) -> bytes:
    """Return the body of ``/generate`` or ``/generate_stream``: scalars, or flat lists that the server shapes.

    Raises :class:`InvalidRequestError` for what JSON cannot carry.
    """
    body: dict[str, Any] = {"id": request.request_id}
    if request.parameters:
        body["parameters"] = dict(request.parameters)
    for name, array in request.arrays.items():
        values = _to_json(name, array)
        body[name] = values[0] if len(values) == 1 and request.tensor(name).dims == (1,) else values
    return json.dumps(body).encode()


def _to_json(name: str, array: NDArray[Any]) -> list[Any]:
    flat = array.reshape(-1).tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        given = next(value for value in flat if not math.isfinite(value))
        raise InvalidRequestError(refusal(name, "must be a finite number over HTTP", given=given))
    try:
        return [value.decode() if isinstance(value, bytes) else value for value in flat]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(refusal(name, "must be UTF-8 text over HTTP", given=error.object)) from error


def decode_http(text: str | bytes, status: int = HTTP_OK) -> GenerationChunk:
    """Read one JSON answer; raise the server's error."""
    answer = _parse_json(text, status)
    if not isinstance(answer, Mapping):
        raise EngineFailureError(f"the server's answer (HTTP {status}) is not an object: {text[:200]!r}")
    if "error" in answer:
        raise (
            error_of_message(str(answer["error"]))
            if status == HTTP_OK
            else error_of_http_status(status, str(answer["error"]))
        )
    if status != HTTP_OK:
        raise error_of_http_status(status, f"HTTP {status}: {text[:200]!r}")
    return make_chunk({name: value if isinstance(value, list) else [value] for name, value in answer.items()})


def decode_grpc_index(message: Any) -> tuple[ModelState, ...]:
    """Read a RepositoryIndexResponse."""
    return tuple(ModelState(m.name, m.version, m.state, m.reason) for m in message.models)


def decode_http_index(text: bytes, status: int) -> tuple[ModelState, ...]:
    """Read the JSON of ``/v2/repository/index``; raise the server's error."""
    answer = _parse_json(text, status)
    if status != HTTP_OK or not isinstance(answer, list):
        raise error_of_http_status(status, f"the list of models cannot be read (HTTP {status}): {text[:200]!r}")
    names = ("name", "version", "state", "reason")
    return tuple(ModelState(*(str(model.get(name, "")) for name in names)) for model in answer)


def _parse_json(text: str | bytes, status: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        msg = f"the server's answer (HTTP {status}) is not JSON: {text[:200]!r}"
        raise (EngineFailureError(msg) if status == HTTP_OK else error_of_http_status(status, msg)) from error


class EventParser:
    """Server-sent events from bytes, wherever the pieces are cut. Each byte is looked at once."""

    def __init__(self) -> None:
        self._line = bytearray()  # the beginning of a line
        self._data: list[bytes] = []  # the data lines of the event so far

    def push(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of every event that became complete."""
        *complete, rest = piece.split(b"\n")
        for end in complete:
            line = bytes(self._line + end).removesuffix(b"\r")
            self._line.clear()
            if line.startswith(b"data:"):
                self._data.append(line[len(b"data:") :].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
        self._line += rest

    @property
    def is_inside_event(self) -> bool:
        """Whether an event began and did not end."""
        return bool(self._line or self._data)
