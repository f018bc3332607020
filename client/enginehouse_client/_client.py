"""The clients: one method to generate, one to stream; the rest is options."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Final

from enginehouse_client._grpc import AsyncGrpcTransport, GrpcTransport
from enginehouse_client._http import AsyncHttpTransport, HttpTransport
from enginehouse_client._request import (
    FRONT_DOOR,
    GenerationOptions,
    GenerationRequest,
    Message,
    make_probe,
    make_request,
)
from enginehouse_client._results import GenerationChunk, GenerationResult, ModelState, join_chunks
from enginehouse_client._transport import AsyncTransport, Deadline, Transport, parse_address
from enginehouse_contract.errors import (
    BudgetExceededError,
    EnginehouseError,
    InvalidRequestError,
    OverloadedError,
    ServerUnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from typing_extensions import Self, Unpack

_DEFAULT_TIMEOUT_S: Final = 600.0
_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 2.0


def pause_before_retry(error: EnginehouseError, attempt: int, max_retries: int) -> float | None:
    """Return how long to wait before trying again, or None where that is not safe or not wanted.

    Safe is only what cannot have started: nothing was sent, or the server said that it is full.
    """
    is_safe = isinstance(error, (ServerUnreachableError, OverloadedError))
    if attempt >= max_retries or not is_safe or isinstance(error, BudgetExceededError):
        return None
    hint_s = error.retry_after_s if isinstance(error, OverloadedError) else None
    wanted_s: float = max(_FIRST_PAUSE_S * 2**attempt, hint_s or 0.0)
    return min(wanted_s, _MAX_PAUSE_S)


class Client:
    """A blocking client of one server.

    ``Client("127.0.0.1:8001")`` speaks gRPC, ``Client("http://127.0.0.1:8000")`` HTTP. Thread-safe. Use it as a
    context manager, or close it. *max_retries* bounds how often a request is tried again that cannot have started (no
    connection, or a full server); 0 turns that off. A *transport* of your own replaces the network.
    """

    def __init__(self, address: str, *, max_retries: int = 2, transport: Transport | None = None) -> None:
        is_http, target = parse_address(address)
        self._transport = transport or (HttpTransport(target) if is_http else GrpcTransport(target))
        self._max_retries = max_retries
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = FRONT_DOOR,
        timeout_s: float | None = _DEFAULT_TIMEOUT_S,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """Generate a whole answer to a prompt or to chat messages.

        Args:
            prompt: The text to continue; or else
            messages: the conversation to answer, rendered by the model's own chat template.
            model: The Triton model to ask.
            timeout_s: Time limit of the whole call, in seconds; the request is cancelled when it passes.
            request_id: Seen in the server's log and in the result; a new one unless given.
            **options: See :class:`GenerationOptions`.

        Raises errors of :mod:`enginehouse_contract.errors` only.
        """
        request = make_request(
            prompt, messages, options, model=model, request_id=request_id or uuid.uuid4().hex, stream=False
        )
        return join_chunks(self._stream(request, timeout_s))

    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = FRONT_DOOR,
        timeout_s: float | None = _DEFAULT_TIMEOUT_S,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationChunk, None, None]:
        """Yield the answer's chunks as they come; arguments as for :meth:`generate`.

        The request is checked here and sent by the first ``next``. Closing the iterator early, or dropping it, cancels
        the request on the server.
        """
        request = make_request(
            prompt, messages, options, model=model, request_id=request_id or uuid.uuid4().hex, stream=True
        )
        return self._stream(request, timeout_s)

    def server_ready(self, timeout_s: float = 5.0) -> bool:
        """Return whether the server answers requests."""
        return self._open().is_ready(None, timeout_s)

    def model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Return whether a model answers requests."""
        return self._open().is_ready(model, timeout_s)

    def probe(self, timeout_s: float = 5.0) -> str:
        """Ask the front door whether its engines answer; return the id of the build that serves.

        What readiness should be and Triton's is not: a model whose process died stays "ready" there. Nothing is
        generated or billed. Raises :class:`EngineUnavailableError` when an engine is gone, and what
        :meth:`generate` raises when the server is.
        """
        return join_chunks(self._stream(make_probe(uuid.uuid4().hex), timeout_s)).build_id or ""

    def models(self, timeout_s: float = 5.0) -> tuple[ModelState, ...]:
        """Return the models of the server's repository, loaded or not."""
        return self._open().models(timeout_s)

    def close(self) -> None:
        """Close the connections; a request still in flight ends as cancelled."""
        if not self._is_closed:
            self._is_closed = True
            self._transport.close()

    def _open(self) -> Transport:
        if self._is_closed:
            raise InvalidRequestError(_CLOSED)
        return self._transport

    def _stream(self, request: GenerationRequest, timeout_s: float | None) -> Generator[GenerationChunk, None, None]:
        deadline = Deadline.after(timeout_s)
        attempt = 0
        while True:
            has_begun = False
            try:
                with closing(self._open().stream(request, deadline)) as chunks:
                    for chunk in chunks:
                        has_begun = True
                        yield chunk
            except EnginehouseError as error:
                pause_s = None if has_begun else pause_before_retry(error, attempt, self._max_retries)
                if pause_s is None or not deadline.allows(pause_s):
                    raise
            else:
                return
            attempt += 1
            time.sleep(pause_s)


class AsyncClient:
    """The same for asyncio; belongs to the event loop of its first call."""

    def __init__(self, address: str, *, max_retries: int = 2, transport: AsyncTransport | None = None) -> None:
        is_http, target = parse_address(address)
        self._transport = transport or (AsyncHttpTransport(target) if is_http else AsyncGrpcTransport(target))
        self._max_retries = max_retries
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = FRONT_DOOR,
        timeout_s: float | None = _DEFAULT_TIMEOUT_S,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> GenerationResult:
        """Generate a whole answer; as :meth:`Client.generate`. Cancelling the task cancels the request."""
        request = make_request(
            prompt, messages, options, model=model, request_id=request_id or uuid.uuid4().hex, stream=False
        )
        async with aclosing(self._stream(request, timeout_s)) as chunks:
            return join_chunks([chunk async for chunk in chunks])

    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = FRONT_DOOR,
        timeout_s: float | None = _DEFAULT_TIMEOUT_S,
        request_id: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the answer's chunks as they come; as :meth:`Client.generate_stream`.

        After a ``break`` the request is cancelled as soon as the iterator is collected; ``aclose`` does it at once.
        """
        request = make_request(
            prompt, messages, options, model=model, request_id=request_id or uuid.uuid4().hex, stream=True
        )
        return self._stream(request, timeout_s)

    async def server_ready(self, timeout_s: float = 5.0) -> bool:
        """Return whether the server answers requests."""
        return await self._open().is_ready(None, timeout_s)

    async def model_ready(self, model: str, timeout_s: float = 5.0) -> bool:
        """Return whether a model answers requests."""
        return await self._open().is_ready(model, timeout_s)

    async def probe(self, timeout_s: float = 5.0) -> str:
        """Ask the front door whether its engines answer; as :meth:`Client.probe`."""
        async with aclosing(self._stream(make_probe(uuid.uuid4().hex), timeout_s)) as chunks:
            return join_chunks([chunk async for chunk in chunks]).build_id or ""

    async def models(self, timeout_s: float = 5.0) -> tuple[ModelState, ...]:
        """Return the models of the server's repository, loaded or not."""
        return await self._open().models(timeout_s)

    async def close(self) -> None:
        """Close the connections; a request still in flight ends as cancelled."""
        if not self._is_closed:
            self._is_closed = True
            await self._transport.close()

    def _open(self) -> AsyncTransport:
        if self._is_closed:
            raise InvalidRequestError(_CLOSED)
        return self._transport

    async def _stream(
        self, request: GenerationRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerationChunk, None]:
        deadline = Deadline.after(timeout_s)
        attempt = 0
        while True:
            has_begun = False
            try:
                async with aclosing(self._open().stream(request, deadline)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
            except EnginehouseError as error:
                pause_s = None if has_begun else pause_before_retry(error, attempt, self._max_retries)
                if pause_s is None or not deadline.allows(pause_s):
                    raise
            else:
                return
            attempt += 1
            await asyncio.sleep(pause_s)


_CLOSED: Final = "this client is closed; make a new one."
