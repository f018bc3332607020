"""HTTP: Triton's ``/generate_stream`` for streams, ``/generate`` where one answer comes.

Closing the socket is what tells the server that its client left; a connection is reused only after a whole answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast
from urllib.parse import quote

import aiohttp
import urllib3
from yarl import URL

from enginehouse_client._errors import FOREIGN_ERRORS, incomplete, map_exception
from enginehouse_client._transport import CONNECT_TIMEOUT_S
from enginehouse_client._wire import HTTP_OK, EventParser, decode_http, decode_http_index, encode_http

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterator

    from enginehouse_client._request import GenerationRequest
    from enginehouse_client._results import GenerationChunk, ModelState
    from enginehouse_client._transport import Deadline

_PIECE_BYTES: Final = 1 << 16
_INDEX_PATH: Final = "/v2/repository/index"


class HttpTransport:
    """Blocking HTTP."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._pool = urllib3.PoolManager(retries=False, maxsize=64)

    def stream(self, request: GenerationRequest, deadline: Deadline) -> Generator[GenerationChunk, None, None]:
        """Yield the request's chunks."""
        body, answer = encode_http(request), _Answer(request)
        try:
            timeout = _timeout(deadline.remaining_s())
            url = self._address + _path(request)
            response = self._pool.request("POST", url, body=body, timeout=timeout, preload_content=False)
            try:
                for piece in _pieces(response, deadline):
                    yield from answer.push(piece, response.status)
                yield from answer.finish(response.status, self._address)
            except BaseException:
                response.close()
                raise
            response.release_conn()
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._address) from error

    def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Ask for readiness."""
        try:
            response = self._pool.request("GET", self._address + _ready_path(model), timeout=_timeout(timeout_s))
        except FOREIGN_ERRORS:
            return False
        return bool(response.status == HTTP_OK)

    def models(self, timeout_s: float) -> tuple[ModelState, ...]:
        """Ask for the repository's index."""
        try:
            response = self._pool.request("POST", self._address + _INDEX_PATH, timeout=_timeout(timeout_s))
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._address) from error
        return decode_http_index(response.data, response.status)

    def close(self) -> None:
        """Close the pool."""
        self._pool.clear()


class AsyncHttpTransport:
    """HTTP for asyncio; its session is opened by the first call, inside the running loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._session: aiohttp.ClientSession | None = None

    async def stream(self, request: GenerationRequest, deadline: Deadline) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the request's chunks."""
        body, answer = encode_http(request), _Answer(request)
        timeout = _async_timeout(deadline.remaining_s())
        try:
            async with self._open().post(self._url(_path(request)), data=body, timeout=timeout) as response:
                try:
                    async for piece in response.content.iter_any():
                        for chunk in answer.push(piece, response.status):
                            yield chunk
                    for chunk in answer.finish(response.status, self._address):
                        yield chunk
                except BaseException:
                    response.close()
                    raise
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._address) from error

    async def is_ready(self, model: str | None, timeout_s: float) -> bool:
        """Ask for readiness."""
        try:
            url, timeout = self._url(_ready_path(model)), _async_timeout(timeout_s)
            async with self._open().get(url, timeout=timeout) as response:
                return bool(response.status == HTTP_OK)
        except FOREIGN_ERRORS:
            return False

    async def models(self, timeout_s: float) -> tuple[ModelState, ...]:
        """Ask for the repository's index."""
        try:
            async with self._open().post(self._url(_INDEX_PATH), timeout=_async_timeout(timeout_s)) as response:
                return decode_http_index(await response.read(), response.status)
        except FOREIGN_ERRORS as error:
            raise map_exception(error, self._address) from error

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _url(self, path: str) -> URL:
        return URL(self._address + path, encoded=True)


class _Answer:
    """Turns the pieces of a response's body into chunks: events of a stream, else one JSON object."""

    def __init__(self, request: GenerationRequest) -> None:
        self._is_stream = not request.answers_once
        self._events = EventParser()
        self._body = bytearray()

    def push(self, piece: bytes, status: int) -> Iterator[GenerationChunk]:
        if self._is_stream and status == HTTP_OK:
            for event in self._events.push(piece):
                yield decode_http(event)
        else:
            self._body += piece

    def finish(self, status: int, address: str) -> Iterator[GenerationChunk]:
        if not self._is_stream or status != HTTP_OK:
            yield decode_http(bytes(self._body).removeprefix(b"data:"), status)
        elif self._events.is_inside_event:
            raise incomplete(address)


def _pieces(response: urllib3.BaseHTTPResponse, deadline: Deadline) -> Iterator[bytes]:
    """Yield the body as it comes, each wait bounded by what is left of the whole time limit."""
    pieces = response.stream(_PIECE_BYTES, decode_content=False)
    while True:
        left_s = deadline.remaining_s()
        connection = cast("urllib3.connection.HTTPConnection | None", response.connection)
        if left_s is not None and connection is not None and connection.sock is not None:
            connection.sock.settimeout(left_s)
        piece = next(pieces, None)
        if piece is None:
            return
        yield piece


def _timeout(left_s: float | None) -> urllib3.Timeout:
    return urllib3.Timeout(connect=CONNECT_TIMEOUT_S if left_s is None else min(CONNECT_TIMEOUT_S, left_s), read=left_s)


def _async_timeout(left_s: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=left_s, sock_connect=CONNECT_TIMEOUT_S)


def _path(request: GenerationRequest) -> str:
    method = "generate" if request.answers_once else "generate_stream"
    return f"/v2/models/{quote(request.model, safe='')}/{method}"


def _ready_path(model: str | None) -> str:
    return "/v2/health/ready" if model is None else f"/v2/models/{quote(model, safe='')}/ready"
