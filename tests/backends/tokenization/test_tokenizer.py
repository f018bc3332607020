"""Loading a build's tokenizer, and its limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.support.small_tokenizers import write_byte_level, write_sentencepiece

from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_contract.errors import BuildIntegrityError, InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse_backends.tokenization.tokenizer import Tokenizer


def test_special_ids_are_those_of_the_config(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """bos, eos and pad are read from texts and from objects; one that the config lacks is None."""
    assert byte_level.bos_id == byte_level.encode("<|im_start|>")[0]
    assert byte_level.eos_id == byte_level.pad_id == byte_level.encode("<|im_end|>")[0]
    assert (sentencepiece.bos_id, sentencepiece.eos_id, sentencepiece.pad_id) == (1, 2, None)
    assert byte_level.special_text("eos_token") == "<|im_end|>"
    assert sentencepiece.special_text("pad_token") == ""


def test_special_tokens_are_added_on_demand(sentencepiece: Tokenizer) -> None:
    """A tokenizer that puts a BOS before a prompt does so unless told otherwise."""
    assert sentencepiece.encode("The end")[0] == sentencepiece.bos_id
    assert sentencepiece.encode("The end")[1:] == sentencepiece.encode("The end", add_special_tokens=False)


def test_decode_skips_special_tokens_on_demand(byte_level: Tokenizer) -> None:
    """Special tokens are left out of the text unless asked for."""
    token_ids = byte_level.encode("The end<|im_end|>")

    assert byte_level.decode(token_ids) == "The end"
    assert byte_level.decode(token_ids, skip_special_tokens=False) == "The end<|im_end|>"


def test_a_prompt_fits_exactly_or_is_refused_with_both_lengths(tokenizer: Tokenizer) -> None:
    """A prompt as long as the limit is taken; one token more is refused with the limit and its own length."""
    token_ids = tokenizer.encode("The quick brown fox jumps")
    num_tokens = len(token_ids)

    assert tokenizer.encode_prompt(b"The quick brown fox jumps", num_tokens) == token_ids
    expected = f"`text_input` is too long; limit {num_tokens - 1} tokens, given {num_tokens} tokens"
    with pytest.raises(InvalidRequestError, match=expected):
        tokenizer.encode_prompt("The quick brown fox jumps", num_tokens - 1)


class Unread:
    """Stands for a tokenizer that must not be asked."""

    def encode(self, text: str, *, add_special_tokens: bool) -> None:
        raise AssertionError(text)


def test_a_huge_prompt_is_refused_unread(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 MB cannot be 2,048 tokens of at most so many bytes each, so they are refused before they are tokenized."""
    monkeypatch.setattr(byte_level, "_fast", Unread())
    for prompt, unit in ((b"a" * 10_000_000, "bytes"), ("a" * 10_000_000, "characters")):
        with pytest.raises(InvalidRequestError, match=f"limit 2048 tokens, given 10000000 {unit}"):
            byte_level.encode_prompt(prompt, 2048)


def test_the_byte_bound_refuses_nothing_that_fits(byte_level: Tokenizer) -> None:
    """A prompt of the longest token, again and again, is as many bytes as fit, and is taken."""
    vocabulary = byte_level.vocabulary
    longest = max(map(vocabulary.bytes_of, range(vocabulary.size)), key=len)
    prompt = longest * 20

    assert byte_level.encode_prompt(prompt, 20) == byte_level.encode(prompt)


def test_an_empty_prompt_is_refused(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """No tokens cannot be continued; where a BOS is added there is one."""
    with pytest.raises(InvalidRequestError, match="`text_input` is empty"):
        byte_level.encode_prompt("", 10)
    assert sentencepiece.encode_prompt("", 10) == [sentencepiece.bos_id]


def test_text_that_is_not_unicode_is_refused_with_its_offset(byte_level: Tokenizer) -> None:
    """Invalid UTF-8 and lone surrogates are refused by name and position."""
    with pytest.raises(InvalidRequestError, match="`text_input` is not valid UTF-8 at byte 3"):
        byte_level.encode(b"abc\xff")
    with pytest.raises(InvalidRequestError, match="`stop_words` holds a lone surrogate at character 1"):
        byte_level.encode("a\ud800", name="stop_words")


def test_the_vocabulary_is_as_large_as_the_models(tmp_path: Path) -> None:
    """An engine's or a Hugging Face config says how far the ids go; without one the tokenizer does."""
    folder = write_byte_level(tmp_path)
    own_size = load_tokenizer(folder).vocabulary.size
    for config in ({"pretrained_config": {"vocab_size": 600}}, {"vocab_size": 600}):
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert load_tokenizer(folder).vocabulary.size == 600
    (folder / "config.json").write_text("{}", encoding="utf-8")

    assert load_tokenizer(folder).vocabulary.size == own_size


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    """A file that says to cut or pad its prompts is not obeyed: prompts are refused by our limits instead."""
    folder = write_byte_level(tmp_path)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    path.write_text(json.dumps(raw), encoding="utf-8")

    assert len(load_tokenizer(folder).encode("The quick brown fox")) > 2


def test_chat_templates_are_found_where_hugging_face_keeps_them(tmp_path: Path) -> None:
    """In the config as one text or as a list with a default, or in a file of its own; or nowhere."""
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]

    assert load_tokenizer(write_byte_level(tmp_path / "a", chat_template="X")).chat_template == "X"
    assert load_tokenizer(write_byte_level(tmp_path / "b", chat_template=named)).chat_template == "D"
    assert load_tokenizer(write_sentencepiece(tmp_path / "c")).chat_template is None
    (tmp_path / "c" / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert load_tokenizer(tmp_path / "c").chat_template == "J"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "is not a readable tokenizer"),
        ("tokenizer_config.json", "{", "is not readable JSON"),
        ("tokenizer_config.json", "[]", "does not hold an object"),
    ],
)
def test_missing_and_broken_files_are_named(tmp_path: Path, name: str, content: str | None, problem: str) -> None:
    """A build without its tokenizer, or with a damaged one, is refused by the file's name."""
    path = write_byte_level(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content, encoding="utf-8")

    with pytest.raises(BuildIntegrityError, match=problem) as caught:
        load_tokenizer(tmp_path)
    assert name in str(caught.value)


def test_a_missing_config_means_no_special_tokens(tmp_path: Path) -> None:
    """`tokenizer_config.json` may be missing: then there is no end id and no chat template."""
    (write_byte_level(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)

    assert (tokenizer.eos_id, tokenizer.chat_template) == (None, None)
