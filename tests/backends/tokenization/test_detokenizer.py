"""Streamed text against decoding the whole."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from enginehouse_backends.tokenization.detokenizer import IncrementalDetokenizer, complete_prefix_length, decode_tokens
from enginehouse_backends.tokenization.vocabulary import Vocabulary

if TYPE_CHECKING:
    from enginehouse_backends.tokenization.tokenizer import Tokenizer

TEXTS = [
    "The end, the END.",
    "naïve café",
    "你好世界 こんにちは",
    "🎉🎉 👩‍👩‍👧 🏳️‍🌈",
    "e\u0301 a\u0308\u0323",
    "<|im_end|> x",
]
BYTES = Vocabulary([bytes([byte]) for byte in range(256)], frozenset(), is_byte_level=True)


def cut(rng: random.Random, token_ids: list[int]) -> list[list[int]]:
    """Cut into random pieces, empty ones among them."""
    borders = sorted(rng.choices(range(len(token_ids) + 1), k=rng.randint(0, 8)))
    return [token_ids[start:end] for start, end in itertools.pairwise([0, *borders, len(token_ids)])]


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Mix tokens of texts with arbitrary ones, which make invalid bytes."""
    token_ids: list[int] = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.5:
            token_ids += tokenizer.encode(rng.choice(TEXTS), add_special_tokens=rng.random() < 0.5)
        else:
            token_ids += rng.choices(range(tokenizer.vocabulary.size), k=rng.randint(1, 5))
    return token_ids


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_deltas_join_to_the_whole(tokenizer: Tokenizer, seed: int, *, skip_special_tokens: bool) -> None:
    """However a sequence is cut, its deltas join to the bytes decoded at once, and none ends inside a character."""
    rng = random.Random(seed)
    vocabulary = tokenizer.vocabulary
    token_ids = random_ids(rng, tokenizer)
    bytes_of = vocabulary.text_bytes_of if skip_special_tokens else vocabulary.bytes_of
    whole = b"".join(map(bytes_of, token_ids)).decode("utf-8", "replace")
    detokenizer = IncrementalDetokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    deltas = [detokenizer.push(piece) for piece in cut(rng, token_ids)]

    assert "".join(deltas) + detokenizer.flush() == whole
    assert whole.startswith("".join(deltas))


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_byte_level_text_is_the_librarys(byte_level: Tokenizer, seed: int, *, skip_special_tokens: bool) -> None:
    """For byte-level BPE the text is what the `tokenizers` library decodes, invalid bytes included."""
    token_ids = random_ids(random.Random(seed), byte_level)
    text = decode_tokens(byte_level.vocabulary, token_ids, skip_special_tokens=skip_special_tokens)

    assert text == byte_level.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_a_prompts_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """A tokenized prompt decodes to itself: the dummy space of SentencePiece goes, a real first space stays."""
    for prompt in (text, f" {text}"):
        token_ids = tokenizer.encode(prompt)

        assert decode_tokens(tokenizer.vocabulary, token_ids, skip_special_tokens=True) == prompt


def test_generated_text_keeps_its_first_space(sentencepiece: Tokenizer) -> None:
    """What follows a prompt begins with the space that separates it; only a prompt's start loses one."""
    prompt, whole = sentencepiece.encode("The quick"), sentencepiece.encode("The quick brown fox")
    generated = whole[len(prompt) :]
    prompt_text = decode_tokens(sentencepiece.vocabulary, prompt, skip_special_tokens=True)
    text = decode_tokens(sentencepiece.vocabulary, generated, skip_special_tokens=True)

    assert prompt_text + text == "The quick brown fox"


def test_only_the_first_space_of_a_prompt_goes(sentencepiece: Tokenizer) -> None:
    """The dummy space goes also when the first token comes alone, and later spaces stay."""
    detokenizer = IncrementalDetokenizer(sentencepiece.vocabulary, starts_prompt=True)
    token_ids = sentencepiece.encode("The end  of it")

    assert "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.flush() == "The end  of it"


@pytest.mark.parametrize("seed", range(100))
def test_deltas_cut_at_complete_prefixes_decode_alone(seed: int) -> None:
    """Held back until their characters are complete, pieces decoded each on its own join to the whole."""
    rng = random.Random(seed)
    text = "".join(rng.choices(["a", "é", "你", "🎉", "\u0301"], k=12)).encode()
    noise = bytes(rng.choices(range(256), k=rng.choice([0, 0, 6])))
    stream = list(text[:9] + noise + text[9:])
    held: list[int] = []
    shown = ""
    for piece in cut(rng, stream):
        held += piece
        count = complete_prefix_length(BYTES, held)
        shown += decode_tokens(BYTES, held[:count], skip_special_tokens=True)
        held = held[count:]
        assert len(held) < 4
    shown += decode_tokens(BYTES, held, skip_special_tokens=True)

    assert shown == bytes(stream).decode("utf-8", "replace")


def test_complete_prefixes_hold_back_no_more_than_a_character(byte_level: Tokenizer) -> None:
    """Whole characters and bytes that begin none are let go at once; special tokens change nothing."""
    end_id = byte_level.eos_id
    assert end_id is not None
    split = [byte_level.vocabulary.segment(bytes([byte])) for byte in "🎉".encode()]
    party = [token_id for piece in split if piece for token_id in piece]

    assert complete_prefix_length(byte_level.vocabulary, party) == 4
    assert complete_prefix_length(byte_level.vocabulary, [end_id, *party[:3]]) == 1
    assert complete_prefix_length(byte_level.vocabulary, [*party[:2], end_id]) == 0
    assert complete_prefix_length(byte_level.vocabulary, [party[1]]) == 1
    assert complete_prefix_length(byte_level.vocabulary, []) == 0
