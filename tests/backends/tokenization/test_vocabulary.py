"""The exact bytes of tokens, and looking tokens up by them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from enginehouse_backends.tokenization.vocabulary import Vocabulary
from enginehouse_contract.errors import BuildIntegrityError

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse_backends.tokenization.tokenizer import Tokenizer

TEXTS = ["The end.", "naïve café", "你好世界", "🎉 👩‍👩‍👧", "e\u0301 + 1\n\n    x", "\x00\x7f tab\t"]


def write(path: Path, model: dict[str, Any], added: list[dict[str, Any]] | None = None) -> Path:
    """Write a minimal tokenizer.json."""
    path.write_text(json.dumps({"model": model, "added_tokens": added or []}), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_joined_bytes_are_the_text(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    """The tokens of a text say the text; SentencePiece's also say the dummy space before it."""
    for tokenizer, dummy in ((byte_level, b""), (sentencepiece, b" ")):
        token_ids = tokenizer.encode(text, add_special_tokens=False)

        assert b"".join(map(tokenizer.vocabulary.bytes_of, token_ids)) == dummy + text.encode()


def test_special_tokens_are_known_and_say_nothing(byte_level: Tokenizer) -> None:
    """A special token is flagged and has no text; an added token that is not special has."""
    vocabulary = byte_level.vocabulary
    end, tool = byte_level.encode("<|im_end|><tool>")

    assert vocabulary.is_special(end)
    assert vocabulary.bytes_of(end) == b"<|im_end|>"
    assert vocabulary.text_bytes_of(end) == b""
    assert not vocabulary.is_special(tool)
    assert vocabulary.text_bytes_of(tool) == b"<tool>"
    assert end not in vocabulary.ids_with_prefix(b"<|")
    assert tool in vocabulary.ids_containing(b"tool")


def test_a_padded_head_has_empty_tokens(tmp_path: Path) -> None:
    """Ids from the tokenizer's end to the model's vocabulary exist and say nothing."""
    vocabulary = Vocabulary.from_tokenizer_json(write(tmp_path / "t.json", {"type": "BPE", "vocab": {"a": 0}}), 8)

    assert vocabulary.size == 8
    assert [vocabulary.bytes_of(token_id) for token_id in range(8)] == [b"a", *[b""] * 7]


def test_unigram_pieces_bytes_and_spaces(tmp_path: Path) -> None:
    """A Unigram vocabulary is a list; its pieces show spaces as a block and bytes by their number."""
    pieces = [["<unk>", 0.0], ["▁the", -1.0], ["<0xE4>", -2.0], ["<0xe4", -2.0]]
    vocabulary = Vocabulary.from_tokenizer_json(write(tmp_path / "t.json", {"type": "Unigram", "vocab": pieces}), 4)

    assert [vocabulary.bytes_of(token_id) for token_id in range(4)] == [b"<unk>", b" the", b"\xe4", b"<0xe4"]


@pytest.mark.parametrize("seed", range(20))
def test_look_ups_are_the_naive_ones(seed: int) -> None:
    """Tokens by prefix, part and spelling against a walk over all tokens, with bytes at the edge of their range."""
    rng = random.Random(seed)
    alphabet = [b"\x00", b"a", b"b", b"\xff"]
    token_bytes = [b"".join(rng.choices(alphabet, k=rng.randint(0, 5))) for _ in range(80)]
    special = frozenset(rng.sample(range(80), 5))
    vocabulary = Vocabulary(token_bytes, special, is_byte_level=True)
    ordinary = [i for i in range(80) if token_bytes[i] and i not in special]
    for _ in range(60):
        part = b"".join(rng.choices(alphabet, k=rng.randint(1, 4)))
        with_prefix = [i for i in ordinary if token_bytes[i].startswith(part)]
        containing = [i for i in ordinary if part in token_bytes[i]]
        spelled = vocabulary.segment(part)

        assert sorted(vocabulary.ids_with_prefix(part).tolist()) == with_prefix
        assert sorted(vocabulary.ids_containing(part).tolist()) == containing
        assert spelled is None or b"".join(token_bytes[i] for i in spelled) == part
        assert spelled is None or set(spelled) <= set(ordinary)


def test_spelling_takes_the_longest_pieces_and_pieces_before_bytes() -> None:
    """Of tokens with the same bytes the piece is taken, which comes after the byte; None where nothing spells it."""
    vocabulary = Vocabulary([b"a", b"b", b"a", b"ab", b"c"], frozenset({4}), is_byte_level=False)

    assert vocabulary.segment(b"aba") == (3, 2)
    assert vocabulary.segment(b"abc") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"model": {"type": "BPE"}}', "KeyError"),
        ('{"model": {"vocab": {"a": "x"}}}', "ValueError"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}', "KeyError"),
        ('{"model": {"vocab": {"a": 9}}}', "token ids up to 9, but the model's vocabulary ends at 3"),
        ('{"model": {"vocab": {"a": -1}}}', "token ids up to -1"),
        ('{"model": {"type": "WordPiece", "vocab": {"a": 0}}}', "holds a WordPiece tokenizer; supported are BPE"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    """Whatever is wrong with the file, the error names it and what is wrong."""
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(BuildIntegrityError, match=problem) as caught:
        Vocabulary.from_tokenizer_json(path, 4)
    assert str(path) in str(caught.value)
