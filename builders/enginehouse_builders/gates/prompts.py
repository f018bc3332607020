"""Prompts for the gates: the set that comes with Enginehouse, and the user's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from pathlib import Path

_SHIPPED: Final = "prompts.jsonl"
_ROLES: Final = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, or chat messages to answer. ``where`` names its line for messages to the user."""

    where: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] = ()


def shipped_prompts() -> tuple[Prompt, ...]:
    """Return the set that comes with Enginehouse: prose, code, numbers, tables, several languages, and chats."""
    text = resources.files("enginehouse_builders.gates").joinpath(_SHIPPED).read_text(encoding="utf-8")
    return _parse(text, "shipped")


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read a file of prompts: JSON lines with ``prompt``, or with ``messages`` (a list of role and content).

    Raises :class:`ConfigurationError` naming the file and the line that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror or error}).") from error
    prompts = _parse(text, str(path))
    if not prompts:
        raise ConfigurationError(f'{path} holds no prompts; write lines such as {{"prompt": "Once upon a time"}}.')
    return prompts


def _parse(text: str, name: str) -> tuple[Prompt, ...]:
    lines = enumerate(text.split("\n"), start=1)
    return tuple(_parse_line(line, f"{name}:{number}") for number, line in lines if line.strip())


def _parse_line(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON ({error}).") from error
    if not isinstance(entry, dict) or set(entry) not in ({"prompt"}, {"messages"}):
        raise ConfigurationError(f"{where}: must be an object with `prompt` or with `messages`, and nothing else.")
    if "prompt" in entry:
        return Prompt(where, text=_text(entry["prompt"], where, "prompt"))
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigurationError(f"{where}: " + refusal("messages", "must be a list with at least one message"))
    return Prompt(where, messages=tuple(_message(message, where) for message in messages))


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or set(message) != {"role", "content"} or message["role"] not in _ROLES:
        problem = f'must be objects with "role" ({", ".join(_ROLES)}) and "content"'
        raise ConfigurationError(f"{where}: " + refusal("messages", problem))
    return {"role": str(message["role"]), "content": _text(message["content"], where, "content")}


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{where}: " + refusal(field, "must be a text that is not empty", given=value))
    return value
