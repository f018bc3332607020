"""gRPC: one ModelStreamInfer stream per request, over tritonclient's own messages.

Cancelling the call is what tells the server that its client left. tritonclient's stream API is not used: it needs a
thread per stream and shares one stream among requests.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from enginehouse_client._errors import FOREIGN_ERRORS, incomplete, map_exception
from enginehouse_client._wire import decode_grpc, decode_grpc_index, encode_grpc
from enginehouse_contract.errors import EnginehouseError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from enginehouse_client._request import GenerationRequest
    from enginehouse_client._results import GenerationChunk, ModelState
    from enginehouse_client._transport import Deadline

_MAX_MESSAGE_BYTES: Final = 2**31 - 1
_OPTIONS: Final = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Without these a channel that was refused once repeats that answer for a second or more without asking again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_http_proxy", 0),  # as over HTTP: an address is where it says
)


class GrpcTransport:
    """Blocking gRPC."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, request: GenerationRequest, deadline: Deadline) -> Generator[GenerationChunk, None, None]:
        """Yield the request's chunks."""
        message = encode_grpc(request)
        call = self._stub.ModelStreamInfer(iter((message,)), timeout=deadline.remaining_s())
        try:
            for response in call:
                try:
                    chunk, is_final = decode_grpc(response)
                except EnginehouseError:
                    _drain(call)
                    raise
                if is_final:
                    _drain(call)
                if chunk is not None:
                    yield chunk
                if is_final:
                    return
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._target) from error
        finally:
            call.cancel()  # a finished call ignores it
        raise incomplete(self._target)

    def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Ask for readiness."""
        try:
            name, message = _readiness(model)
            return bool(getattr(self._stub, name)(message, timeout=timeout_s).ready)
        except FOREIGN_ERRORS:
            return False

    def models(self, timeout_s: float) -> tuple[ModelState, ...]:
        """Ask for the repository's index."""
        try:
            answer = self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=timeout_s)
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._target) from error
        return decode_grpc_index(answer)

    def close(self) -> None:
        """Close the channel; calls in flight end as cancelled."""
        self._channel.close()


class AsyncGrpcTransport:
    """gRPC for asyncio; its channel is opened by the first call, inside the running loop."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel: grpc.aio.Channel | None = None
        self._opened_stub: Any = None

    async def stream(self, request: GenerationRequest, deadline: Deadline) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the request's chunks."""
        message = encode_grpc(request)
        call = self._stub().ModelStreamInfer(iter((message,)), timeout=deadline.remaining_s())
        try:
            async for response in call:
                try:
                    chunk, is_final = decode_grpc(response)
                except EnginehouseError:
                    await _drain_async(call)
                    raise
                if is_final:
                    await _drain_async(call)
                if chunk is not None:
                    yield chunk
                if is_final:
                    return
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._target) from error
        finally:
            call.cancel()
        raise incomplete(self._target)

    async def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Ask for readiness."""
        try:
            name, message = _readiness(model)
            return bool((await getattr(self._stub(), name)(message, timeout=timeout_s)).ready)
        except FOREIGN_ERRORS:
            return False

    async def models(self, timeout_s: float) -> tuple[ModelState, ...]:
        """Ask for the repository's index."""
        try:
            answer = await self._stub().RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=timeout_s)
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._target) from error
        return decode_grpc_index(answer)

    async def close(self) -> None:
        """Close the channel; calls in flight end as cancelled."""
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
            self._opened_stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        return self._opened_stub


def _drain(call: Any) -> None:
    """Wait for a call's own end once its last response was seen.

    Cancelling a call that is just ending leaves Triton 2.51 with a request that it never lets go, and with it the
    model, which then cannot be unloaded any more.
    """
    with contextlib.suppress(*FOREIGN_ERRORS):
        for _ in call:
            pass


async def _drain_async(call: Any) -> None:
    """As :func:`_drain`."""
    with contextlib.suppress(*FOREIGN_ERRORS):
        async for _ in call:
            pass


def _readiness(model: str | None) -> tuple[str, Any]:
    """Return the method that tells readiness, and its message."""
    if model is None:
        return "ServerReady", service_pb2.ServerReadyRequest()
    return "ModelReady", service_pb2.ModelReadyRequest(name=model)
