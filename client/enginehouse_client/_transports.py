"""The four ways to a server: gRPC and HTTP, blocking and not. Each streams one request's chunks.

A transport is the seam of this package: clients take any object with these two methods, so tests need no patching.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

import aiohttp
import grpc
import grpc.aio
import urllib3
from tritonclient.grpc import service_pb2, service_pb2_grpc

from enginehouse_client._errors import map_exception
from enginehouse_client._wire import STATUS_METADATA, EventParser, decode_grpc, decode_http, encode_grpc, encode_http

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from enginehouse_client._request import GenerationRequest
    from enginehouse_client._results import GenerationChunk

_MAX_MESSAGE_BYTES = 2**31 - 1
_GRPC_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
)
_CONNECT_TIMEOUT_S = 5.0
_OK = 200


class Transport(Protocol):
    """A blocking way to a server."""

    address: str

    def stream(self, request: GenerationRequest, timeout_s: float | None) -> Generator[GenerationChunk, None, None]:
        """Yield the request's chunks; closing the iterator early cancels the request on the server."""
        ...

    def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Return whether the server, or one model of it, answers requests."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class AsyncTransport(Protocol):
    """A way to a server for asyncio."""

    address: str

    def stream(self, request: GenerationRequest, timeout_s: float | None) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the request's chunks; closing the iterator early cancels the request on the server."""
        ...

    async def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Return whether the server, or one model of it, answers requests."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class GrpcTransport:
    """gRPC: one ModelStreamInfer stream per request."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_GRPC_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, request: GenerationRequest, timeout_s: float | None) -> Generator[GenerationChunk, None, None]:
        """Yield the request's chunks."""
        message = encode_grpc(request)
        call = self._stub.ModelStreamInfer(iter((message,)), timeout=timeout_s, metadata=STATUS_METADATA)
        try:
            for response in call:
                chunk, is_final = decode_grpc(response)
                if chunk is not None:
                    yield chunk
                if is_final:
                    return
        except grpc.RpcError as error:
            raise map_exception(error, self.address) from error
        finally:
            call.cancel()  # a finished call ignores it

    def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Ask for readiness."""
        try:
            if model is None:
                return bool(self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout_s).ready)
            request = service_pb2.ModelReadyRequest(name=model)
            return bool(self._stub.ModelReady(request, timeout=timeout_s).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class HttpTransport:
    """HTTP: `/generate_stream` for streams, `/generate` otherwise."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._pool = urllib3.PoolManager(retries=False, maxsize=64)

    def stream(self, request: GenerationRequest, timeout_s: float | None) -> Generator[GenerationChunk, None, None]:
        """Yield the request's chunks."""
        timeout = urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=timeout_s)
        try:
            response = self._pool.request(
                "POST", _url(self.address, request), body=encode_http(request), timeout=timeout, preload_content=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise map_exception(error, self.address) from error
        is_complete = False
        try:
            if request.answers_once or response.status != _OK:
                text = response.data
                is_complete = True
                yield decode_http(text.removeprefix(b"data:"), response.status)
                return
            parser = EventParser()
            for piece in response.stream(4096, decode_content=False):
                for event in parser.push(piece):
                    yield decode_http(event)
            is_complete = True
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise map_exception(error, self.address) from error
        finally:
            if not is_complete:
                response.close()  # a closed socket is how HTTP says: no longer wanted
            response.release_conn()

    def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Ask for readiness."""
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        with contextlib.suppress(urllib3.exceptions.HTTPError, OSError):
            return bool(self._pool.request("GET", self.address + path, timeout=timeout_s).status == _OK)
        return False

    def close(self) -> None:
        """Close the pool."""
        self._pool.clear()


class AsyncGrpcTransport:
    """gRPC for asyncio."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=_GRPC_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def stream(
        self, request: GenerationRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the request's chunks."""
        message = encode_grpc(request)
        call = self._stub.ModelStreamInfer(iter((message,)), timeout=timeout_s, metadata=STATUS_METADATA)
        try:
            async for response in call:
                chunk, is_final = decode_grpc(response)
                if chunk is not None:
                    yield chunk
                if is_final:
                    return
        except grpc.RpcError as error:
            raise map_exception(error, self.address) from error
        finally:
            call.cancel()

    async def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Ask for readiness."""
        try:
            if model is None:
                return bool((await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=timeout_s)).ready)
            request = service_pb2.ModelReadyRequest(name=model)
            return bool((await self._stub.ModelReady(request, timeout=timeout_s)).ready)
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class AsyncHttpTransport:
    """HTTP for asyncio; its session is opened by the first request, inside the running loop."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def stream(
        self, request: GenerationRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the request's chunks."""
        timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT_S, sock_read=timeout_s)
        try:
            async with self._open().post(
                _url(self.address, request), data=encode_http(request), timeout=timeout
            ) as response:
                if request.answers_once or response.status != _OK:
                    yield decode_http((await response.read()).removeprefix(b"data:"), response.status)
                    return
                parser = EventParser()
                async for piece in response.content.iter_any():
                    for event in parser.push(piece):
                        yield decode_http(event)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise map_exception(error, self.address) from error

    async def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Ask for readiness."""
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._open().get(self.address + path, timeout=timeout) as response:
                return bool(response.status == _OK)
        return False

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session


def _url(address: str, request: GenerationRequest) -> str:
    method = "generate" if request.answers_once else "generate_stream"
    return f"{address}/v2/models/{request.model}/{method}"


def is_http(address: str) -> bool:
    """Return whether an address is an HTTP one; anything without a scheme is gRPC."""
    return address.startswith(("http://", "https://"))


def open_transport(address: str) -> Transport:
    """Return the blocking transport of an address."""
    return HttpTransport(address) if is_http(address) else GrpcTransport(address)


def open_async_transport(address: str) -> AsyncTransport:
    """Return the asyncio transport of an address."""
    return AsyncHttpTransport(address) if is_http(address) else AsyncGrpcTransport(address)
