"""Chat messages through the model's template."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.small_tokenizers import write_byte_level

from enginehouse_backends.tokenization.chat import parse_messages, render_chat
from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_contract.errors import BuildIntegrityError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from enginehouse_backends.tokenization.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def render(tmp_path: Path) -> Callable[..., str]:
    """Render messages through a template."""

    def render_with(template: str, messages: list[dict[str, str]] = HELLO) -> str:
        return render_chat(load_tokenizer(write_byte_level(tmp_path, chat_template=template)), messages)

    return render_with


def test_messages_become_a_prompt(byte_level: Tokenizer) -> None:
    """Messages are rendered in order, ready for the assistant's answer; blocks leave no white space behind."""
    messages = parse_messages('[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 🎉"}]')

    assert render_chat(byte_level, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n你好 🎉<|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_find_what_hugging_face_gives_them(render: Callable[..., str]) -> None:
    """Special tokens, plain JSON, the date, loop controls, generation blocks, and tools that are none."""
    assert render("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}") == "<|im_start|>|<|im_end|>|"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hello"}'
    assert render("{{ {'a': '<é>'} | tojson(indent=2) }}") == '{\n  "a": "<é>"\n}'
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hello!"
    assert render("{% if tools is not none or documents is not none %}tools{% endif %}{{ add_generation_prompt }}") == (
        "True"
    )


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('only two roles') }}", r"refused by the model's chat template \(only two roles\)"),
        ("{{ messages[0].content + 1 }}", "refused by the model's chat template"),
        ("{{ 1 // 0 }}", "refused by the model's chat template"),
        ("{{ messages[0].nothing.at_all }}", "refused by the model's chat template"),
        ("{{ messages.append(1) }}", "refused by the model's chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused by the model's chat template"),
    ],
)
def test_what_a_template_raises_is_a_refusal(render: Callable[..., str], template: str, problem: str) -> None:
    """Its own message, any error of its program, and what the sandbox forbids end the request, not the server."""
    with pytest.raises(InvalidRequestError, match=problem):
        render(template)


def test_a_broken_template_is_the_builds_fault(render: Callable[..., str]) -> None:
    """A template that is no Jinja is reported as a broken build."""
    with pytest.raises(BuildIntegrityError, match="chat template is not a Jinja template"):
        render("{% for %}")


def test_a_build_without_a_template_says_so(sentencepiece: Tokenizer) -> None:
    """Chat messages need a template; the refusal says what to send instead."""
    with pytest.raises(InvalidRequestError, match=r"no chat template\. Send the prompt as text"):
        render_chat(sentencepiece, HELLO)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hello", "`messages` is not JSON"),
        (b"\xff[]", "`messages` is not JSON"),
        ("{}", "must be a list with at least one message"),
        ("[]", "must be a list with at least one message"),
        (json.dumps(HELLO * 1025), "holds too many messages; limit 1024, given 1025"),
        ('["hello"]', r'`messages\[0\]` must be an object with "role" and "content"'),
        ('[{"role": "user"}]', r'`messages\[0\]` must be an object with "role" and "content"'),
        ('[{"role": "user", "content": "a", "x": 1}]', r"`messages\[0\]` must be an object"),
        ('[{"role": "king", "content": "a"}]', r"`messages\[0\].role` must be one of system, user.*given king"),
        ('[{"role": ["user"], "content": "a"}]', r"`messages\[0\].role` must be one of"),
        ('[{"role": "user", "content": [1]}]', r"`messages\[0\].content` must be a text"),
        ("[" * 100_000, "`messages` is not JSON"),
    ],
)
def test_what_is_no_list_of_messages_is_refused(messages: Any, problem: str) -> None:
    """The refusal says what is wrong, and in which message."""
    with pytest.raises(InvalidRequestError, match=problem):
        parse_messages(messages)
