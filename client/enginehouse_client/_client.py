"""The clients: one method to generate, one to stream; the rest is options."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Final

from enginehouse_client._errors import is_connection_failure
from enginehouse_client._request import FRONT_DOOR, GenerationOptions, GenerationRequest, Message, make_request
from enginehouse_client._results import GenerationChunk, GenerationResult, join_chunks
from enginehouse_client._transports import AsyncTransport, Transport, open_async_transport, open_transport
from enginehouse_contract.errors import EnginehouseError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from typing_extensions import Self

_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 2.0


def _pause_before_retry(error: EnginehouseError, attempt: int, max_retries: int) -> float | None:
    """Return how long to wait before trying again, or None where that is not safe or not wanted.

    Safe is only what cannot have started: nothing reached the server, or the server said it is full.
    """
    if attempt >= max_retries or not (is_connection_failure(error) or isinstance(error, OverloadedError)):
        return None
    pause_s: float = min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S)
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        pause_s = max(pause_s, min(error.retry_after_s, _MAX_PAUSE_S))
    return pause_s


def _new_request(
    prompt: str | None, messages: Sequence[Message] | None, fields: dict[str, Any], *, stream: bool
) -> GenerationRequest:
    model = fields.pop("model", None) or FRONT_DOOR
    request_id = fields.pop("request_id", None) or uuid.uuid4().hex
    options = GenerationOptions(**fields)
    return make_request(prompt, messages, options, model=model, request_id=request_id, stream=stream)


class Client:
    """A blocking client of one server.

    ``Client("127.0.0.1:8001")`` speaks gRPC, ``Client("http://127.0.0.1:8000")`` HTTP. Thread-safe. Use it as a
    context manager, or close it.
    """

    def __init__(self, address: str, *, max_retries: int = 2, transport: Transport | None = None) -> None:
        self._transport = transport or open_transport(address)
        self._max_retries = max_retries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = 600.0,
        **options: Any,
    ) -> GenerationResult:
        """Generate a whole answer to a prompt or to chat messages.

        *options* are the fields of :class:`GenerationOptions`, ``model`` and ``request_id``. Raises errors of
        :mod:`enginehouse_contract.errors` only.
        """
        request = _new_request(prompt, messages, options, stream=False)
        return join_chunks(self._stream(request, timeout_s))

    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = 600.0,
        **options: Any,
    ) -> Iterator[GenerationChunk]:
        """Yield the answer's chunks as they come; closing the iterator early cancels the request on the server."""
        return self._stream(_new_request(prompt, messages, options, stream=True), timeout_s)

    def server_ready(self, timeout_s: float = 5.0) -> bool:
        """Return whether the server answers requests."""
        return self._transport.is_ready(None, timeout_s)

    def model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Return whether a model answers requests."""
        return self._transport.is_ready(model, timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def _stream(self, request: GenerationRequest, timeout_s: float | None) -> Iterator[GenerationChunk]:
        for attempt in range(self._max_retries + 1):
            has_begun = False
            try:
                with closing(self._transport.stream(request, timeout_s)) as chunks:
                    for chunk in chunks:
                        has_begun = True
                        yield chunk
            except EnginehouseError as error:
                pause_s = None if has_begun else _pause_before_retry(error, attempt, self._max_retries)
                if pause_s is None:
                    raise
                time.sleep(pause_s)
            else:
                return


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, address: str, *, max_retries: int = 2, transport: AsyncTransport | None = None) -> None:
        self._transport = transport or open_async_transport(address)
        self._max_retries = max_retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = 600.0,
        **options: Any,
    ) -> GenerationResult:
        """Generate a whole answer; as :meth:`Client.generate`."""
        request = _new_request(prompt, messages, options, stream=False)
        return join_chunks([chunk async for chunk in self._stream(request, timeout_s)])

    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout_s: float | None = 600.0,
        **options: Any,
    ) -> AsyncIterator[GenerationChunk]:
        """Yield the answer's chunks as they come; closing the iterator early cancels the request on the server."""
        return self._stream(_new_request(prompt, messages, options, stream=True), timeout_s)

    async def server_ready(self, timeout_s: float = 5.0) -> bool:
        """Return whether the server answers requests."""
        return await self._transport.is_ready(None, timeout_s)

    async def model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Return whether a model answers requests."""
        return await self._transport.is_ready(model, timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def _stream(self, request: GenerationRequest, timeout_s: float | None) -> AsyncIterator[GenerationChunk]:
        for attempt in range(self._max_retries + 1):
            has_begun = False
            try:
                async with aclosing(self._transport.stream(request, timeout_s)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
            except EnginehouseError as error:
                pause_s = None if has_begun else _pause_before_retry(error, attempt, self._max_retries)
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
            else:
                return
