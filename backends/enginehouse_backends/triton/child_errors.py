"""What a called model's error message means: Triton passes the words on, not the code."""

from __future__ import annotations

import re
from typing import Final

from enginehouse_contract.errors import (
    EngineFailureError,
    EnginehouseError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnsupportedFeatureError,
)

_UNHEALTHY: Final = ("is not healthy", "is not ready", "is not found", "has no available versions", "unknown model")
"""What Triton's messages say when the called model is not there to answer."""


_REFUSAL: Final = re.compile(r"^`[\w.\[\]-]+`")

_WORDS: Final[dict[str, type[EnginehouseError]]] = {
    "queue is full": OverloadedError,
    "was cancelled": RequestCancelledError,
    "shutting down": EngineUnavailableError,
    "reload the model": EngineUnavailableError,
}


def error_of_message(message: str) -> EnginehouseError:
    """Turn a called model's error into ours. A refusal of ours begins with its field in backticks."""
    if any(words in message for words in _UNHEALTHY):
        return EngineUnavailableError(f"the engine is not there to answer: {message}")
    if _REFUSAL.search(message):
        return (UnsupportedFeatureError if "not supported" in message else InvalidRequestError)(message)
    for words, kind in _WORDS.items():
        if words in message:
            return kind(message)
    return EngineFailureError(message)
