"""The exception tree shared by every part of Enginehouse.

Three tiers: ``None`` means *not now* (no room, nothing yet); an exception of this tree means misuse or a refused
request and carries the Triton error code it becomes on the wire; an assertion means a bug of ours.

::

    EnginehouseError
    ├── InvalidRequestError          INVALID_ARG      a value the request may not have
    │   └── UnsupportedFeatureError  UNSUPPORTED      a feature this engine does not offer, named
    ├── RequestCancelledError        CANCELLED        the client, or a `stop` request, ended it
    ├── DeadlineExceededError        UNAVAILABLE      a stated time limit passed
    ├── OverloadedError              UNAVAILABLE      try again later
    │   └── BudgetExceededError      UNAVAILABLE      a tenant's budget or quota is used up until it resets
    ├── EngineUnavailableError       UNAVAILABLE      the engine (or the server) is not there
    │   └── ServerUnreachableError   UNAVAILABLE      no connection could be made; nothing was sent
    ├── EngineFailureError           INTERNAL         the engine failed while computing
    ├── ConfigurationError           INVALID_ARG      a setting or a model parameter is wrong
    ├── LedgerUnavailableError       UNAVAILABLE      the ledger cannot be written or read now
    ├── LedgerConflictError          ALREADY_EXISTS   the ledger holds this key with other content
    ├── BuildError                   INTERNAL         a build could not be made
    │   └── ModelSourceError         INVALID_ARG      the model given cannot be built from
    ├── BuildIntegrityError          INVALID_ARG      a build's files are not what its manifest says
    ├── PromotionError               INVALID_ARG      a change of what is served was refused or undone
    ├── RemoteStoreError             UNAVAILABLE      a remote store of builds does not answer as it should
    └── ServerStartError             UNAVAILABLE      tritonserver could not be started

Messages say which field, which limit, what was given, and what to do; :func:`refusal` puts them in that order.
"""

from __future__ import annotations

from typing import ClassVar, Literal

ErrorCode = Literal[
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"
]
"""Triton's error codes, spelled as ``TRITONSERVER_ERROR_*`` without the prefix."""


class EnginehouseError(Exception):
    """Base of every error a user may see; ``code`` is the Triton code it travels under."""

    code: ClassVar[ErrorCode] = "INTERNAL"


class InvalidRequestError(EnginehouseError):
    """A request carries a value it may not have; nothing was changed by it."""

    code: ClassVar[ErrorCode] = "INVALID_ARG"


class UnsupportedFeatureError(InvalidRequestError):
    """A request asks, by name, for something this engine does not offer."""

    code: ClassVar[ErrorCode] = "UNSUPPORTED"


class RequestCancelledError(EnginehouseError):
    """The request was ended by its client or by a ``stop`` request."""

    code: ClassVar[ErrorCode] = "CANCELLED"


class DeadlineExceededError(EnginehouseError):
    """A stated time limit passed before the answer was complete."""

    code: ClassVar[ErrorCode] = "UNAVAILABLE"


class OverloadedError(EnginehouseError):
    """There is no room for this request now; ``retry_after_s`` is a hint, in seconds."""

    code: ClassVar[ErrorCode] = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BudgetExceededError(OverloadedError):
    """A tenant's budget or quota has no room for this request; ``retry_after_s`` is when its window resets."""


class EngineUnavailableError(EnginehouseError):
    """The engine or the server that should answer is not there."""

    code: ClassVar[ErrorCode] = "UNAVAILABLE"


class ServerUnreachableError(EngineUnavailableError):
    """No connection to the server could be made: nothing was sent, so trying again is safe."""


class EngineFailureError(EnginehouseError):
    """The engine failed while computing this request."""

    code: ClassVar[ErrorCode] = "INTERNAL"


class ConfigurationError(EnginehouseError):
    """A setting, a flag or a model parameter has a value it may not have."""

    code: ClassVar[ErrorCode] = "INVALID_ARG"


class LedgerUnavailableError(EnginehouseError):
    """The ledger cannot be written or read now: disk full, folder read-only, database gone or locked."""

    code: ClassVar[ErrorCode] = "UNAVAILABLE"


class LedgerConflictError(EnginehouseError):
    """The ledger holds an entry under this key with other content, or none where one is needed."""

    code: ClassVar[ErrorCode] = "ALREADY_EXISTS"


class BuildError(EnginehouseError):
    """A build could not be made."""

    code: ClassVar[ErrorCode] = "INTERNAL"


class ModelSourceError(BuildError):
    """The given model cannot be built from: unreadable, truncated, or of an unknown kind."""

    code: ClassVar[ErrorCode] = "INVALID_ARG"


class BuildIntegrityError(EnginehouseError):
    """A build's files are not what its manifest says, or the manifest cannot be read."""

    code: ClassVar[ErrorCode] = "INVALID_ARG"


class PromotionError(EnginehouseError):
    """A change of what is served was refused, or undone; what served before still serves unless the message differs."""

    code: ClassVar[ErrorCode] = "INVALID_ARG"


class RemoteStoreError(EnginehouseError):
    """A remote store of builds cannot be reached, or fails."""

    code: ClassVar[ErrorCode] = "UNAVAILABLE"


class ServerStartError(EnginehouseError):
    """A tritonserver could not be started here; the message says what is missing."""

    code: ClassVar[ErrorCode] = "UNAVAILABLE"


def refusal(field: str, problem: str, *, given: object = None, limit: object = None, hint: str = "") -> str:
    """Word a refusal: field in backticks, what is wrong, the limit, the value given, what to do.

    >>> refusal("top_p", "must lie in (0, 1]", given=2.0)
    '`top_p` must lie in (0, 1]; given 2.0.'
    >>> refusal("max_tokens", "is too large", limit=2048, given=4096, hint="Ask for fewer tokens.")
    '`max_tokens` is too large; limit 2048, given 4096. Ask for fewer tokens.'
    """
    facts = ", ".join(
        f"{name} {_shorten(value)}" for name, value in (("limit", limit), ("given", given)) if value is not None
    )
    sentence = f"`{field}` {problem}" + (f"; {facts}" if facts else "") + "."
    return f"{sentence} {hint}" if hint else sentence


def _shorten(value: object, max_chars: int = 80) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
