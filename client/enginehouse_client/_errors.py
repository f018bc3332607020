"""Every foreign exception of the transports, and every error message of a server, mapped to our tree.

gRPC streams and HTTP's ``/generate`` carry a message and no code, so words decide. Streams could carry codes under the
metadata ``triton_grpc_error: true``, but a refused request under it may abort Triton 2.51 (a call is finished twice):
it is never sent.
"""

from __future__ import annotations

import asyncio
import http.client
import re
from typing import TYPE_CHECKING, Final

import aiohttp
import grpc
import grpc.aio
import urllib3.exceptions as u3
from aiohttp.http_exceptions import HttpProcessingError
from tritonclient.utils import InferenceServerException

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

if TYPE_CHECKING:
    from collections.abc import Callable

FOREIGN_ERRORS: Final = (
    grpc.RpcError,
    grpc.aio.BaseError,
    u3.HTTPError,
    aiohttp.ClientError,
    HttpProcessingError,
    http.client.HTTPException,
    InferenceServerException,
    asyncio.TimeoutError,  # another class than TimeoutError before Python 3.11
    TimeoutError,
    OSError,
)
"""What the libraries below may raise; a transport lets none of them through."""

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

_BY_WORDS: Final[tuple[tuple[str, Callable[[str], EnginehouseError]], ...]] = (
    ("the server is full", OverloadedError),
    ("Retry in about", OverloadedError),
    ("queue is full", OverloadedError),
    ("`timeout_ms` passed", DeadlineExceededError),
    ("is not healthy", EngineUnavailableError),
    ("is not there to answer", EngineUnavailableError),
    ("reload the model", EngineUnavailableError),
    ("did not load: ", EngineUnavailableError),
    ("taken out of service", EngineUnavailableError),
    ("shutting down", EngineUnavailableError),
    (" died", EngineUnavailableError),
    ("was silent for", EngineUnavailableError),
    ("was cancelled", RequestCancelledError),
    ("the client left", RequestCancelledError),
    ("internal error", EngineFailureError),
    ("is broken", EngineFailureError),
    ("unknown model", InvalidRequestError),
    ("is not found", InvalidRequestError),
    ("unexpected shape", InvalidRequestError),
    ("unexpected datatype", InvalidRequestError),
    ("unexpected inference input", InvalidRequestError),
    ("Unable to parse", InvalidRequestError),
    ("but got", InvalidRequestError),  # "expected 3 inputs but got 2 inputs for model ..."
)
"""Words of Triton, of the engine and of the front door, in the order in which they decide."""

_BUDGET: Final = re.compile(r"^`budget` is used up|^`model` has no price")
_STEP_PREFIX: Final = re.compile(r"^in ensemble '[^']*', ")
_REFUSAL: Final = re.compile(r"^`[\w.\[\]-]+`")  # a refusal of ours begins with its field
_RETRY_HINT: Final = re.compile(r"[Rr]etry in about (\d+) s")
_NOTHING_SENT: Final = ("failed to connect", "connection refused", "name resolution", "resolving")


def error_of_message(
    message: str, otherwise: Callable[[str], EnginehouseError] = EngineFailureError
) -> EnginehouseError:
    """Return our error for a server's message; *otherwise* makes it where the words do not decide."""
    message = _STEP_PREFIX.sub("", message)
    if _BUDGET.match(message):
        return BudgetExceededError(message)
    if _REFUSAL.match(message):
        return (UnsupportedFeatureError if "not supported" in message else InvalidRequestError)(message)
    make = next((make for words, make in _BY_WORDS if words in message), otherwise)
    error = make(message)
    if isinstance(error, OverloadedError) and (hint := _RETRY_HINT.search(message)):
        error.retry_after_s = float(hint[1])
    return error


def error_of_grpc_status(code: grpc.StatusCode, details: str) -> EnginehouseError:
    """Return our error for a gRPC status."""
    by_code = _BY_GRPC_CODE.get(code, EngineFailureError)
    if code is grpc.StatusCode.UNAVAILABLE:
        return error_of_message(details or code.name, by_code)
    return by_code(details or code.name)


def error_of_http_status(status: int, message: str) -> EnginehouseError:
    """Return our error for an HTTP status; ``/generate`` answers 400 for every error of a model."""
    return error_of_message(message, _BY_HTTP_STATUS.get(status, EngineFailureError))


_UNREACHABLE: Final = (
    u3.NewConnectionError,
    u3.ConnectTimeoutError,
    u3.ProxyError,
    u3.SSLError,
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
    ConnectionRefusedError,
)


def map_exception(error: BaseException, address: str) -> EnginehouseError:
    """Return our error for one of :data:`FOREIGN_ERRORS`."""
    if isinstance(error, (grpc.RpcError, grpc.aio.BaseError)):
        return _of_grpc(error, address)
    if isinstance(error, InferenceServerException):
        return _of_tritonclient(error)
    return _of_http(error, address)


def incomplete(address: str) -> EnginehouseError:
    """Return the error of a stream that ended before its final response."""
    return EngineUnavailableError(f"the answer of {address} ended before it was complete.")


def _of_grpc(error: BaseException, address: str) -> EnginehouseError:
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):  # misuse of the library, or a failure inside it
        return EngineFailureError(f"gRPC to {address} failed ({type(error).__name__}: {error}).")
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _too_late(address)
    if code is grpc.StatusCode.UNAVAILABLE:
        if any(words in details.lower() for words in _NOTHING_SENT):
            hint = " Is it the server's HTTP port?" if "Socket closed" in details else ""
            return ServerUnreachableError(f"no server answers gRPC at {address} ({_short(details)}).{hint}")
        return error_of_message(details, lambda text: EngineUnavailableError(f"{address} went away ({text})."))
    return error_of_grpc_status(code, details)


def _of_http(error: BaseException, address: str) -> EnginehouseError:
    if isinstance(error, u3.MaxRetryError) and error.reason is not None:
        return _of_http(error.reason, address)
    if isinstance(error, (u3.LocationValueError, aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)):
        return ConfigurationError(f"the address `{address}` cannot be used ({_short(error)}).")
    if isinstance(error, _UNREACHABLE):
        return ServerUnreachableError(f"no server answers at {address} ({_short(error)}).")
    if isinstance(error, (u3.TimeoutError, asyncio.TimeoutError, TimeoutError)):
        return _too_late(address)
    if isinstance(error, (aiohttp.ClientResponseError, HttpProcessingError)) or "BadStatusLine" in str(error):
        return EngineUnavailableError(f"{address} does not speak HTTP; is it the server's gRPC port?")
    return EngineUnavailableError(f"the connection to {address} broke ({_short(error)}).")


def _of_tritonclient(error: InferenceServerException) -> EnginehouseError:
    message, status = str(error.message()), str(error.status() or "")
    if status.startswith("StatusCode."):
        return error_of_grpc_status(grpc.StatusCode[status.removeprefix("StatusCode.")], message)
    return error_of_http_status(int(status), message) if status.isdigit() else error_of_message(message)


def _too_late(address: str) -> EnginehouseError:
    return DeadlineExceededError(f"{address} did not answer completely within the client's time limit (`timeout_s`).")


def _short(error: BaseException | str) -> str:
    """The innermost reason of a message made of `outer: inner` parts."""
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error.strerror or str(error.os_error)
    text = str(getattr(error, "reason", None) or error) or type(error).__name__
    return re.sub(r"^\[Errno -?\d+\] ", "", text.rsplit(": ", maxsplit=1)[-1]).rstrip(".]")
