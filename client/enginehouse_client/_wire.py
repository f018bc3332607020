"""Requests and responses on the two wires, without any input or output.

gRPC: ModelStreamInfer, one stream per request. HTTP: Triton's generate extension, JSON in and server-sent events out.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from enginehouse_client._errors import error_of_http_status, error_of_message
from enginehouse_client._results import GenerationChunk, make_chunk
from enginehouse_contract.errors import EngineFailureError

if TYPE_CHECKING:
    from enginehouse_client._request import GenerationRequest

STATUS_METADATA: Final = (("triton_grpc_error", "true"),)
"""Asks the server for real gRPC status codes on streams instead of bare messages."""


def encode_grpc(request: GenerationRequest) -> Any:
    """Return the ModelInferRequest message."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    for name in request.values:
        array = request.array(name)
        data_type = request.tensor(name).data_type
        tensor = message.inputs.add(name=name, datatype="BYTES" if data_type == "STRING" else data_type)
        tensor.shape.extend(array.shape)
        raw = serialize_byte_tensor(array).item() if data_type == "STRING" else array.tobytes()
        message.raw_input_contents.append(raw)
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
    is_final = response.parameters["triton_final_response"].bool_param
    if not response.outputs:
        return None, is_final
    outputs: dict[str, list[Any]] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype == "BYTES":
            outputs[tensor.name] = [value.decode("utf-8", "replace") for value in deserialize_bytes_tensor(raw)]
        else:
            outputs[tensor.name] = np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).tolist()
    return make_chunk(outputs), is_final


def encode_http(request: GenerationRequest) -> bytes:
    """Return the body of `/generate` or `/generate_stream`."""
    body: dict[str, Any] = {"id": request.request_id, **request.values}
    if request.parameters:
        body["parameters"] = dict(request.parameters)
    return json.dumps(body).encode()


def decode_http(text: str | bytes, status: int = 200) -> GenerationChunk:
    """Read one JSON answer; raise the server's error."""
    try:
        answer: Any = json.loads(text)
    except ValueError as error:
        raise EngineFailureError(f"the server's answer (HTTP {status}) is not JSON: {text[:200]!r}") from error
    if not isinstance(answer, Mapping):
        raise EngineFailureError(f"the server's answer (HTTP {status}) is not an object: {text[:200]!r}")
    if "error" in answer or status != 200:  # noqa: PLR2004 - HTTP's OK
        raise error_of_http_status(400 if status == 200 else status, str(answer.get("error", text)))  # noqa: PLR2004
    return make_chunk({name: value if isinstance(value, list) else [value] for name, value in answer.items()})


class EventParser:
    """Server-sent events from bytes, wherever the pieces are cut."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer = ""

    def push(self, piece: bytes) -> Iterator[str]:
        """Yield the data of every event that became complete."""
        self._buffer += self._decoder.decode(piece)
        while "\n\n" in self._buffer:
            event, self._buffer = self._buffer.split("\n\n", 1)
            data = [line[5:].lstrip() for line in event.splitlines() if line.startswith("data:")]
            if data:
                yield "\n".join(data)
