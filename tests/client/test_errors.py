"""No exception of a library below reaches a user, and every error of a server has its type."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import socket
from typing import Any

import aiohttp
import aiohttp.client_exceptions
import aiohttp.http_exceptions
import grpc
import grpc.aio
import pytest
import tritonclient.utils
import urllib3.exceptions

from enginehouse_client._errors import (
    FOREIGN_ERRORS,
    error_of_grpc_status,
    error_of_http_status,
    error_of_message,
    map_exception,
)
from enginehouse_contract.errors import (
    BudgetExceededError,
    ConfigurationError,
    DeadlineExceededError,
    EngineFailureError,
    EnginehouseError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    ServerUnreachableError,
    UnsupportedFeatureError,
)

ADDRESS = "127.0.0.1:8001"
MODULES = (
    grpc,
    grpc.aio,
    urllib3.exceptions,
    aiohttp.client_exceptions,
    aiohttp.http_exceptions,
    http.client,
    tritonclient.utils,
)
_REEXPORTED = {"email.errors"}
NEVER_RAISED_BY_CALLS = {
    grpc.FutureTimeoutError,  # of futures we do not use
    grpc.FutureCancelledError,
    grpc.aio.AbortError,  # raised in servers
    aiohttp.client_exceptions.WSMessageTypeError,  # of websockets
    urllib3.exceptions.ProxySchemeUnsupported,  # of proxies, which are not used
}


def every_foreign_exception() -> list[type[BaseException]]:
    """The public exception classes of the libraries below."""
    found = {
        value
        for module in MODULES
        for name, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, Exception) and not issubclass(value, Warning) and value.__module__ not in _REEXPORTED
    }
    return sorted(found - NEVER_RAISED_BY_CALLS, key=lambda kind: (kind.__module__, kind.__qualname__))


@pytest.mark.parametrize("kind", every_foreign_exception(), ids=lambda kind: f"{kind.__module__}.{kind.__qualname__}")
def test_every_exception_of_the_libraries_is_caught(kind: type[BaseException]) -> None:
    """An upgrade that brings a new kind of exception cannot leak it: it is among those that the transports catch."""
    assert issubclass(kind, FOREIGN_ERRORS)


class RpcFailure(grpc.RpcError, grpc.Call):  # type: ignore[misc] # grpc has no types
    """A failed call, as grpc raises it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def _unused(self, *arguments: Any) -> None:
        raise NotImplementedError

    initial_metadata = trailing_metadata = is_active = time_remaining = cancel = add_callback = _unused


def aio_failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """The same of grpc.aio."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize("fail", [RpcFailure, aio_failure])
@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_grpc_status_has_an_error(fail: Any, code: grpc.StatusCode) -> None:
    """A status becomes an error of the tree that keeps the server's words."""
    error = map_exception(fail(code, "the reason"), ADDRESS)

    assert isinstance(error, EnginehouseError)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        assert isinstance(error, DeadlineExceededError)
        assert "timeout_s" in str(error)
    else:
        assert "the reason" in str(error)


@pytest.mark.parametrize(
    ("foreign", "expected"),
    [
        (
            RpcFailure(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; x: refused"),
            ServerUnreachableError,
        ),
        (aio_failure(grpc.StatusCode.UNAVAILABLE, "errors resolving nope:1: not found"), ServerUnreachableError),
        (grpc.aio.UsageError("closed"), EngineFailureError),
        (urllib3.exceptions.NewConnectionError(None, "x: [Errno 111] Connection refused"), ServerUnreachableError),  # type: ignore[arg-type] # no pool needed
        (urllib3.exceptions.ConnectTimeoutError("slow"), ServerUnreachableError),
        (urllib3.exceptions.ReadTimeoutError(None, "/", "slow"), DeadlineExceededError),  # type: ignore[arg-type] # no pool needed
        (urllib3.exceptions.LocationParseError("x"), ConfigurationError),
        (
            urllib3.exceptions.ProtocolError("Connection aborted.", http.client.BadStatusLine("x")),
            EngineUnavailableError,
        ),
        (urllib3.exceptions.IncompleteRead(3, 4), EngineUnavailableError),
        (aiohttp.ConnectionTimeoutError("slow"), ServerUnreachableError),
        (aiohttp.SocketTimeoutError("slow"), DeadlineExceededError),
        (aiohttp.ServerDisconnectedError(), EngineUnavailableError),
        (aiohttp.ClientPayloadError("cut"), EngineUnavailableError),
        (aiohttp.InvalidURL("x"), ConfigurationError),
        (aiohttp.http_exceptions.BadStatusLine("x"), EngineUnavailableError),
        (asyncio.TimeoutError(), DeadlineExceededError),
        (TimeoutError(), DeadlineExceededError),
        (ConnectionRefusedError(111, "refused"), ServerUnreachableError),
        (ConnectionResetError(104, "reset"), EngineUnavailableError),
        (socket.gaierror(-2, "unknown"), EngineUnavailableError),
        (tritonclient.utils.InferenceServerException("full", "StatusCode.RESOURCE_EXHAUSTED"), OverloadedError),
        (tritonclient.utils.InferenceServerException("gone", "503"), EngineUnavailableError),
        (tritonclient.utils.InferenceServerException("`x` is bad."), InvalidRequestError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.__name__,
)
def test_foreign_errors_become_ours(foreign: BaseException, expected: type[EnginehouseError]) -> None:
    """Exactly the type that says what may be done: only a server that was never reached may be asked again."""
    assert type(map_exception(foreign, ADDRESS)) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("`top_p` must lie in (0, 1]; given 2.0.", InvalidRequestError),
        ("in ensemble 'ensemble', `top_p` must lie in (0, 1]; given 2.0.", InvalidRequestError),
        ("`messages[0].role` must be one of system, user; given robot.", InvalidRequestError),
        ("`lora_weights` is not supported: no adapters.", UnsupportedFeatureError),
        ("`stop_words` is too long; given the server is full, is not healthy, was cancelled.", InvalidRequestError),
        ("the server is full: 64 requests running, 256 waiting. Retry in about 7 s.", OverloadedError),
        ("the engine's queue is full; limit 8 sequences (`max_queue_size`). Try again later.", OverloadedError),
        ("the engine `coder` was not loaded within 30 s (it is loading). Retry in about 4 s.", OverloadedError),
        ("the engine `coder` did not load: no such file. Retry in about 9 s.", OverloadedError),
        ("the engine `coder` did not load: no such file.", EngineUnavailableError),
        ("`budget` is used up: spend per day has 0 left and resets at noon.", BudgetExceededError),
        ("`model` has no price, and tenant acme has a limit on spend per day.", BudgetExceededError),
        ("the request's `timeout_ms` passed while it waited to start.", DeadlineExceededError),
        ("Stub process 'tensorrt_llm_0_0' is not healthy.", EngineUnavailableError),
        ("the engine `tensorrt_llm` died: gone", EngineUnavailableError),
        ("the request was cancelled", RequestCancelledError),
        ("internal error (KeyError); the server's log has the details.", EngineFailureError),
        ("Request for unknown model: 'nope' is not found", InvalidRequestError),
        ("something never heard of", EngineFailureError),
    ],
)
def test_messages_without_a_code_are_told_apart(message: str, expected: type[EnginehouseError]) -> None:
    """Streams carry only words; what a user wrote inside a refusal does not decide."""
    assert type(error_of_message(message)) is expected


def test_a_full_server_says_when_to_come_back() -> None:
    """The hint in its words becomes a number of seconds."""
    error = error_of_message("the server is full: 64 running. Retry in about 7 s.")

    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 7.0


def test_codes_decide_where_words_do_not() -> None:
    """A status gives the type of an unknown message; known words win over HTTP's 400 for everything."""
    assert type(error_of_http_status(400, "odd")) is InvalidRequestError
    assert type(error_of_http_status(501, "odd")) is UnsupportedFeatureError
    assert type(error_of_http_status(599, "odd")) is EngineFailureError
    assert type(error_of_http_status(400, "Stub process 'x' is not healthy.")) is EngineUnavailableError
    assert type(error_of_grpc_status(grpc.StatusCode.UNAVAILABLE, "the server is full")) is OverloadedError
