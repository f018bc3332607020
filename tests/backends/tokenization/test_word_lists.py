"""Stop and bad words: as token ids, and on the wire."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from enginehouse_backends.tokenization.word_lists import (
    MAX_WORD_BYTES,
    MAX_WORDS,
    decode_word_list,
    encode_word_list,
    tokenize_words,
)
from enginehouse_contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from enginehouse_backends.tokenization.tokenizer import Tokenizer

WORDS = ["END", " the", "\n\n", "end.", "é", "你好", "🎉", "e\u0301", "a  b", "zq"]


@pytest.mark.parametrize("word", WORDS)
def test_the_tokens_of_a_word_say_the_word_and_nothing_else(tokenizer: Tokenizer, word: str) -> None:
    """No special token comes before it, and no dummy space, so that it is found in the middle of a text."""
    [token_ids] = tokenize_words(tokenizer, [word.encode()], "stop_words")

    assert b"".join(map(tokenizer.vocabulary.text_bytes_of, token_ids)) == word.encode()


def test_a_special_tokens_text_is_its_id(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    """`<|im_end|>` as a word is the token; within a longer word it stays a token; empty words are skipped."""
    words = tokenize_words(byte_level, [b"<|im_end|>", b"", b"<|im_end|>\n"], "stop_words")

    assert words[0] == (byte_level.eos_id,)
    assert words[1][0] == byte_level.eos_id
    assert len(words) == 2
    assert tokenize_words(sentencepiece, [b"</s>"], "stop_words") == [(2,)]


def test_words_beyond_the_limits_are_refused(byte_level: Tokenizer) -> None:
    """Too many words, and too long ones, are refused by name with limit and size; the limits themselves fit."""
    assert len(tokenize_words(byte_level, [b"a"] * MAX_WORDS, "stop_words")) == MAX_WORDS
    assert len(tokenize_words(byte_level, [b"a" * MAX_WORD_BYTES], "stop_words")) == 1
    with pytest.raises(InvalidRequestError, match="`stop_words` holds too many words; limit 1024, given 10000"):
        tokenize_words(byte_level, [b"a"] * 10_000, "stop_words")
    with pytest.raises(InvalidRequestError, match="`bad_words` is too long; limit 65536 bytes, given 65538 bytes"):
        tokenize_words(byte_level, [b"a" * 32_769] * 2, "bad_words")
    with pytest.raises(InvalidRequestError, match="`stop_words` is not valid UTF-8 at byte 1"):
        tokenize_words(byte_level, [b"a\xff"], "stop_words")


def test_the_wire_format_is_nvidias() -> None:
    """Row 0 holds the ids, row 1 where each word ends, padded with -1; no words are [2, 0]."""
    assert encode_word_list([(5, 6), (7,), (8, 9, 10)]).tolist() == [[5, 6, 7, 8, 9, 10], [2, 3, 6, -1, -1, -1]]
    assert encode_word_list([(), (5,), ()]).tolist() == [[5], [1]]
    assert encode_word_list([]).shape == (2, 0)
    assert encode_word_list([()]).shape == (2, 0)
    assert encode_word_list([(5,)]).dtype == np.int32


@pytest.mark.parametrize("seed", range(50))
def test_words_come_back_from_the_wire(seed: int) -> None:
    """What was encoded is decoded, also when padded as rows of a batch are; empty words are left out."""
    rng = random.Random(seed)
    words = [tuple(rng.choices(range(100), k=rng.randint(0, 4))) for _ in range(rng.randint(0, 6))]
    encoded = encode_word_list(words)
    padding = np.array([[0] * 3, [-1] * 3], np.int32)
    kept = tuple(word for word in words if word)

    assert decode_word_list(encoded, "stop_words_list", 100) == kept
    assert decode_word_list(np.concatenate([encoded, padding], axis=1), "stop_words_list", 100) == kept


def test_offsets_are_read_as_nvidias_backend_reads_them() -> None:
    """-1 is skipped wherever it stands, and a repeated or zero offset is an empty word."""
    array = np.array([[5, 6, 7, 0], [0, 2, -1, 3]], np.int32)

    assert decode_word_list(array, "stop_words_list", 100) == ((5, 6), (7,))
    assert decode_word_list(np.array([[5, 6], [1, 1]], np.int32), "stop_words_list", 100) == ((5,),)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((3, 2), np.int32), r"must have the shape \[2, length\]; given \[3, 2\]"),
        (np.zeros(2, np.int32), r"must have the shape \[2, length\]"),
        (np.array([[1, 2], [2, 1]], np.int32), "do not rise within row 0"),
        (np.array([[1, 2], [3, -1]], np.int32), "do not rise within row 0"),
        (np.array([[1, 2], [-2, 2]], np.int32), "do not rise within row 0"),
        (np.array([[1, 100], [2, -1]], np.int32), "id outside the vocabulary; limit 0 to 99, given 100"),
        (np.array([[-1, 1], [2, -1]], np.int32), "id outside the vocabulary; limit 0 to 99, given -1"),
        (np.zeros((2, MAX_WORD_BYTES + 1), np.int32), "is too long; limit 65536, given 65537"),
        (np.array([range(2000), range(1, 2001)], np.int32), "holds too many words; limit 1024, given 2000"),
    ],
)
def test_a_malformed_list_is_refused(array: np.ndarray, problem: str) -> None:
    """The refusal names the tensor and what is wrong with it."""
    with pytest.raises(InvalidRequestError, match="`stop_words_list`.*" + problem):
        decode_word_list(array, "stop_words_list", 100)
