"""Every foreign exception of the transports, mapped to the tree of :mod:`enginehouse_contract.errors`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
import grpc
import urllib3

from enginehouse_contract.errors import (
    DeadlineExceededError,
    EngineFailureError,
    EnginehouseError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_BY_GRPC_CODE: Final[dict[grpc.StatusCode, Callable[[str], EnginehouseError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: InvalidRequestError,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.PERMISSION_DENIED: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedFeatureError,
    grpc.StatusCode.UNAVAILABLE: EngineUnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.ABORTED: EngineFailureError,
    grpc.StatusCode.INTERNAL: EngineFailureError,
    grpc.StatusCode.UNKNOWN: EngineFailureError,
    grpc.StatusCode.DATA_LOSS: EngineFailureError,
}

_BY_HTTP_STATUS: Final[dict[int, Callable[[str], EnginehouseError]]] = {
    400: InvalidRequestError,
    404: InvalidRequestError,
    413: InvalidRequestError,
    429: OverloadedError,
    499: RequestCancelledError,
    501: UnsupportedFeatureError,
    503: EngineUnavailableError,
    504: DeadlineExceededError,
}

_OVERLOAD_WORDS: Final = ("the server is full", "queue is full")
_CONNECT_WORDS: Final = ("failed to connect", "connection refused", "name resolution", "dns resolution")


def error_of_grpc_status(code: grpc.StatusCode, details: str) -> EnginehouseError:
    """Return our error for a gRPC status; an overloaded server says so in its words."""
    if code is grpc.StatusCode.UNAVAILABLE and any(words in details for words in _OVERLOAD_WORDS):
        return OverloadedError(details, retry_after_s=1.0)
    return _BY_GRPC_CODE.get(code, EngineFailureError)(details or code.name)


def error_of_message(message: str) -> EnginehouseError:
    """Return our error for a message without a code (a stream of a server that sends none)."""
    if any(words in message for words in _OVERLOAD_WORDS):
        return OverloadedError(message, retry_after_s=1.0)
    if message.startswith("`") or " `" in message:
        return InvalidRequestError(message)  # a refusal names its field in backticks
    return EngineFailureError(message)


def error_of_http_status(status: int, message: str) -> EnginehouseError:
    """Return our error for an HTTP status; `/generate` answers 400 for every error of a model."""
    if any(words in message for words in _OVERLOAD_WORDS):
        return OverloadedError(message, retry_after_s=1.0)
    if "is not healthy" in message or "engine is not there" in message or "died" in message:
        return EngineUnavailableError(message)
    return _BY_HTTP_STATUS.get(status, EngineFailureError)(message)


def map_exception(error: BaseException, address: str) -> EnginehouseError:
    """Return our error for any exception of the transports below."""
    if isinstance(error, EnginehouseError):
        return error
    if isinstance(error, grpc.RpcError):
        code = error.code() if callable(getattr(error, "code", None)) else grpc.StatusCode.UNKNOWN
        details = str(error.details() or "") if callable(getattr(error, "details", None)) else str(error)
        if code is grpc.StatusCode.UNAVAILABLE and any(words in details.lower() for words in _CONNECT_WORDS):
            return EngineUnavailableError(f"no server answers at {address} ({details}).")
        return error_of_grpc_status(code, details)
    if isinstance(error, (urllib3.exceptions.TimeoutError, asyncio.TimeoutError, TimeoutError)) and not isinstance(
        error, urllib3.exceptions.ConnectTimeoutError
    ):
        return DeadlineExceededError(f"{address} did not answer in time ({type(error).__name__}).")
    if isinstance(error, (urllib3.exceptions.HTTPError, aiohttp.ClientError, OSError)):
        return EngineUnavailableError(f"no server answers at {address} ({_short(error)}).")
    return EngineFailureError(f"unexpected {type(error).__name__} from {address}: {error}")


def is_connection_failure(error: EnginehouseError) -> bool:
    """Return whether nothing reached the server, so that trying again is safe."""
    return isinstance(error, EngineUnavailableError) and str(error).startswith("no server answers")


def _short(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    text = str(reason)
    return text.rsplit(": ", maxsplit=1)[-1] if ": " in text else text
