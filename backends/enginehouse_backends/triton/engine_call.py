"""Calling an engine model of the server that we run in: over its own gRPC port.

Python's calls between models (BLS) cannot carry many streams at once on Triton 2.51. A thread that waits in a response
iterator holds the iterator's lock while it waits for the GIL; the thread that delivers the next response to it waits
for that lock and holds the table of all iterators; a thread that starts another call holds the GIL and waits for the
table. Then nothing of the process moves again: met in a soak after some thousand responses, and read from the stacks.
Through the port a client that leaves also cancels its engine call at once, and a call may be dropped at any time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from enginehouse_backends.triton.child_errors import error_of_message
from enginehouse_contract.errors import EngineUnavailableError, RequestCancelledError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from enginehouse_contract.errors import EnginehouseError

_MAX_MESSAGE_BYTES: Final = 2**31 - 1
_OPTIONS: Final = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class EngineCalls:
    """A :class:`~enginehouse_backends.front_door.engine_client.CallEngine` over the server at *address*.

    The channel is opened by the first call: when models are loaded the port does not listen yet.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def __call__(
        self,
        model_name: str,
        inputs: Mapping[str, NDArray[Any]],
        requested_outputs: Sequence[str],
        *,
        request_id: str,
        parameters: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Call a decoupled model and yield the tensors of each data response, until its final one.

        Dropping the iterator before that cancels the call. Raises an error of our tree. Blocks in ``next``.
        """
        message = _encode(model_name, inputs, requested_outputs, request_id, parameters or {})
        call = service_pb2_grpc.GRPCInferenceServiceStub(self._open()).ModelStreamInfer(iter((message,)))
        is_over = False
        try:
            for answer in call:
                if answer.error_message:
                    is_over = True
                    raise error_of_message(answer.error_message)
                response = answer.infer_response
                is_over = bool(response.parameters["triton_final_response"].bool_param)
                if response.outputs:
                    yield _decode(response)
        except grpc.RpcError as error:
            is_over = True
            raise _error_of_call(error, self._address) from error
        finally:
            if not is_over:  # a call that is just ending must not be cancelled: Triton would keep its model for ever
                call.cancel()

    def close(self) -> None:
        """Close the channel; calls in flight end as cancelled."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    def _open(self) -> grpc.Channel:
        with self._lock:
            if self._channel is None:
                self._channel = grpc.insecure_channel(self._address, options=_OPTIONS)
            return self._channel


def _encode(
    model_name: str,
    inputs: Mapping[str, NDArray[Any]],
    requested_outputs: Sequence[str],
    request_id: str,
    parameters: Mapping[str, Any],
) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model_name, id=request_id)
    for name, array in inputs.items():
        data_type = np_to_triton_dtype(array.dtype)
        message.inputs.add(name=name, datatype=data_type, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if data_type == "BYTES" else np.ascontiguousarray(array).tobytes()
        message.raw_input_contents.append(raw)
    for name in requested_outputs:
        message.outputs.add(name=name)
    for name, value in parameters.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        elif isinstance(value, int):
            message.parameters[name].int64_param = value
        else:
            message.parameters[name].string_param = str(value)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def _decode(response: Any) -> dict[str, NDArray[Any]]:
    return {
        tensor.name: np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).reshape(tensor.shape)
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _error_of_call(error: Any, address: str) -> EnginehouseError:
    details = str(error.details())
    if error.code() is grpc.StatusCode.CANCELLED:
        return RequestCancelledError("the engine call was cancelled")
    return EngineUnavailableError(f"the server's own port {address} does not answer: {details}")
