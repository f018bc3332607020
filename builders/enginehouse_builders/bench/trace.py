"""Trace files: JSON lines, each a request with its time, its prompt or lengths, and who asks.

::

    {"at": 0.0, "prompt": "The capital of France is", "max_tokens": 16}
    {"at": 0.4, "input_tokens": 512, "max_tokens": 128, "tenant": "acme", "priority": 1}
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.bench.lengths import MAX_LENGTH
from enginehouse_contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace; what is None, the run's own options decide. ``at_s`` counts from the trace's start."""

    at_s: float | None = None
    prompt: str | None = None
    num_input_tokens: int | None = None
    max_tokens: int | None = None
    tenant: str | None = None
    priority: int | None = None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_LENGTH


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_LENGTH: Final = f"a whole number from 1 to {MAX_LENGTH}"
_KEYS: Final[dict[str, tuple[str, Callable[[Any], bool], str]]] = {
    "at": ("at_s", _is_time, "seconds from the start, at least 0"),
    "prompt": ("prompt", _is_text, "text"),
    "input_tokens": ("num_input_tokens", _is_length, _LENGTH),
    "max_tokens": ("max_tokens", _is_length, _LENGTH),
    "tenant": ("tenant", _is_text, "text"),
    "priority": ("priority", _is_int, "a whole number"),
}


def read_trace(path: Path) -> list[TraceLine]:
    """Read a trace, in order of time; either all lines have ``at`` or none.

    Raises :class:`InvalidRequestError` with file and line for what is not a request.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequestError(f"{path}: the trace cannot be read: {reason}.") from None
    numbered = [
        (f"{path}:{number}", parse_trace_line(text, f"{path}:{number}"))
        for number, text in enumerate(texts, 1)
        if text.strip()
    ]
    if not numbered:
        raise InvalidRequestError(f"{path}: the trace has no requests.")
    first = numbered[0][1]
    for where, line in numbered:
        if (line.at_s is None) != (first.at_s is None):
            has = "has no" if line.at_s is None else "has an"
            raise InvalidRequestError(f"{where}: {has} `at`, unlike the first line; give it to all lines or to none.")
    lines = [line for _, line in numbered]
    return lines if first.at_s is None else sorted(lines, key=lambda line: line.at_s or 0.0)


def parse_trace_line(text: str, where: str) -> TraceLine:
    """Read one line; *where* (file and line) begins the message of an :class:`InvalidRequestError`."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{where}: is not JSON ({error.msg} at column {error.colno}).") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{where}: must be a JSON object; given {text[:40]!r}.")
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if name not in _KEYS:
            nearest = difflib.get_close_matches(name, _KEYS, n=1)
            hint = f"Did you mean `{nearest[0]}`?" if nearest else f"Known: {', '.join(_KEYS)}."
            raise InvalidRequestError(f"{where}: `{name}` is unknown. {hint}")
        field, is_good, wanted = _KEYS[name]
        if value is not None and not is_good(value):
            raise InvalidRequestError(f"{where}: `{name}` must be {wanted}; given {json.dumps(value)[:60]}.")
        fields[field] = value
    if fields.get("prompt") is not None and fields.get("num_input_tokens") is not None:
        raise InvalidRequestError(f"{where}: has both `prompt` and `input_tokens`; give one of them.")
    return TraceLine(**fields)
