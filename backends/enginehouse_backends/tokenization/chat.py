"""Chat messages through the model's own template, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from enginehouse_contract.errors import BuildIntegrityError, InvalidRequestError, refusal

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

    from enginehouse_backends.tokenization.tokenizer import Tokenizer

_ROLES: Final = ("system", "user", "assistant", "tool")
_MAX_MESSAGES: Final = 1024


def parse_messages(text: str | bytes) -> list[dict[str, str]]:
    """Read a JSON list of ``{"role": ..., "content": ...}``.

    Raises :class:`InvalidRequestError` saying what is wrong and in which message.
    """
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(refusal("messages", f"is not JSON ({error})")) from error
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(refusal("messages", "must be a list with at least one message"))
    if len(messages) > _MAX_MESSAGES:
        raise InvalidRequestError(
            refusal("messages", "holds too many messages", limit=_MAX_MESSAGES, given=len(messages))
        )
    return [_check_message(message, index) for index, message in enumerate(messages)]


def _check_message(message: Any, index: int) -> dict[str, str]:
    field = f"messages[{index}]"
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise InvalidRequestError(refusal(field, 'must be an object with "role" and "content"'))
    if message["role"] not in _ROLES:
        raise InvalidRequestError(
            refusal(f"{field}.role", f"must be one of {', '.join(_ROLES)}", given=message["role"])
        )
    if not isinstance(message["content"], str):
        raise InvalidRequestError(refusal(f"{field}.content", "must be a text", given=message["content"]))
    return message


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """Return the prompt that the model's template makes of *messages*, ready for the assistant's answer.

    Raises :class:`InvalidRequestError` when the build has no template or the template refuses the messages, and
    :class:`BuildIntegrityError` when the template itself is broken.
    """
    if tokenizer.chat_template is None:
        msg = refusal("messages", "cannot be used: this build has no chat template", hint="Send the prompt as text.")
        raise InvalidRequestError(msg)
    try:
        template = _compile(tokenizer.chat_template)
    except jinja2.TemplateError as error:
        raise BuildIntegrityError(f"this build's chat template is not a Jinja template ({error}).") from error
    special_tokens = {name: tokenizer.special_text(name) for name in ("bos_token", "eos_token", "pad_token")}
    try:
        return template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **special_tokens
        )
    except Exception as error:  # a template is a program and may raise anything
        raise InvalidRequestError(refusal("messages", f"was refused by the model's chat template ({error})")) from error


class _GenerationBlock(Extension):
    """Hugging Face's ``{% generation %}``: marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - an attribute of instances too, as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands in the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now(tz=timezone.utc).strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT002 - templates pass these as Hugging Face declares them
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT002 - as above
) -> str:
    """Templates of Hugging Face expect plain JSON, not the HTML-safe form of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
