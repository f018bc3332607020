"""Stop and bad words against searching the whole text for every word after every token."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from enginehouse_backends.engine.request import GenerationRequest, RequestId
from enginehouse_backends.engine.words import BadWords, StopWords, check_words
from enginehouse_backends.tokenization.vocabulary import Vocabulary
from enginehouse_contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from enginehouse_backends.engine.request import TokenIds
    from enginehouse_backends.engine.words import WordMatching

PIECES = ["".join(letters) for length in (1, 2, 3) for letters in itertools.product("ab", repeat=length)]
TOKENS = [piece.encode() for piece in [*PIECES, "é", "x"]] + [b"\xc3", b"\xa9", b"", b"<|a|>", b"<|b|>"]
SPECIAL = frozenset({len(TOKENS) - 2, len(TOKENS) - 1})
VOCABULARY = Vocabulary(TOKENS, SPECIAL, is_byte_level=True)


def text_of(token_ids: list[int]) -> bytes:
    """Return the text of tokens, special ones left out."""
    return b"".join(map(VOCABULARY.text_bytes_of, token_ids))


def is_by_ids(word: TokenIds, matching: WordMatching) -> bool:
    """Return whether a word matches by ids."""
    return matching == "tokens" or not text_of(list(word)) or bool(SPECIAL & set(word))


def completes(word: TokenIds, before: list[int], token_id: int, matching: WordMatching) -> bool:
    """Return whether a token makes a word end in it."""
    if is_by_ids(word, matching):
        return tuple([*before, token_id][-len(word) :]) == word
    text, seen = text_of(list(word)), text_of(before)
    whole = seen + VOCABULARY.text_bytes_of(token_id)
    return text in whole[max(0, len(seen) - len(text) + 1) :]


def random_word(rng: random.Random) -> TokenIds:
    """Return one to three tokens; one word in three may hold special tokens."""
    choices = range(VOCABULARY.size) if rng.random() < 0.33 else range(VOCABULARY.size - 2)
    return tuple(rng.choices(choices, k=rng.randint(1, 3)))


@pytest.mark.parametrize("matching", ["text", "tokens"])
@pytest.mark.parametrize("seed", range(60))
def test_stop_words_end_where_the_text_contains_them(seed: int, matching: WordMatching) -> None:
    """After each token the answer is a word that it completes, if any; the output goes on after one."""
    rng = random.Random(seed)
    words = tuple(random_word(rng) for _ in range(rng.randint(0, 5)))
    stop_words = StopWords(VOCABULARY, words, None, matching=matching)
    before: list[int] = []
    for token_id in rng.choices(range(VOCABULARY.size), k=50):
        completed = [word for word in words if completes(word, before, token_id, matching)]
        found = stop_words.push(token_id)
        same_text = [w for w in words if found and text_of(list(w)) == text_of(list(found))]

        assert (found is not None) == bool(completed)
        assert found is None or found in completed or set(same_text) & set(completed)
        before.append(token_id)


@pytest.mark.parametrize("matching", ["text", "tokens"])
@pytest.mark.parametrize("seed", range(60))
def test_bad_words_ban_exactly_the_tokens_that_complete_one(seed: int, matching: WordMatching) -> None:
    """After each token, and in the prompt before the first, the banned tokens are those the naive search finds."""
    rng = random.Random(seed)
    words = tuple(random_word(rng) for _ in range(rng.randint(1, 5)))
    before = rng.choices(range(VOCABULARY.size), k=rng.randint(0, 12))
    bad_words = BadWords(VOCABULARY, words, before, matching=matching)
    for token_id in rng.choices(range(VOCABULARY.size), k=25):
        expected = [i for i in range(VOCABULARY.size) if any(completes(w, before, i, matching) for w in words)]

        assert bad_words.banned_ids().tolist() == expected
        bad_words.push(token_id)
        before.append(token_id)


def test_many_bad_words_ban_what_each_alone_bans() -> None:
    """A long list is looked up in another way than a short one, with the same result."""
    words = tuple(dict.fromkeys(itertools.product(range(6), repeat=3)))
    assert len(words) > 64
    alone = {int(i) for word in words for i in BadWords(VOCABULARY, (word,)).banned_ids()}

    assert BadWords(VOCABULARY, words).banned_ids().tolist() == sorted(alone)


def test_of_several_stop_words_the_first_to_end_is_named() -> None:
    """The word that ends first is named, and of those that end together the longest."""
    a, b, aab = (PIECES.index(piece) for piece in ("a", "b", "aab"))

    assert StopWords(VOCABULARY, ((b,), (a,)), None).push(aab) == (a,)
    assert StopWords(VOCABULARY, ((b,), (a, b)), None).push(aab) == (a, b)


def test_the_end_id_stops_whatever_the_words() -> None:
    """The end id, special or not, is reported as a word of its own; None never ends."""
    stop_words = StopWords(VOCABULARY, ((0,),), 0)

    assert stop_words.push(1) is None
    assert stop_words.push(0) == (0,)
    assert StopWords(VOCABULARY, (), None).push(0) is None


def test_a_stop_word_in_the_prompt_does_not_count() -> None:
    """Only output is searched, so that a word begun in the prompt must begin again; a bad word may begin there."""
    a, ab, b = (PIECES.index(piece) for piece in ("a", "ab", "b"))

    assert StopWords(VOCABULARY, ((ab,),), None).push(b) is None
    assert b in BadWords(VOCABULARY, ((ab,),), [a]).banned_ids()
    assert b not in BadWords(VOCABULARY, ((ab,),)).banned_ids()


def test_copies_go_on_alone() -> None:
    """A copy may be asked about tokens that are not taken; the original does not notice."""
    a, ab, b = (PIECES.index(piece) for piece in ("a", "ab", "b"))
    stop_words, bad_words = StopWords(VOCABULARY, ((ab,),), None), BadWords(VOCABULARY, ((ab,),))
    stop_copy, bad_copy = stop_words.copy(), bad_words.copy()
    stop_copy.push(a)
    bad_copy.push(a)

    assert stop_copy.push(b) == (ab,)
    assert b in bad_copy.banned_ids()
    assert stop_words.push(b) is None
    assert b not in bad_words.banned_ids()


def test_no_bad_words_are_false() -> None:
    """Without words, or with empty ones, there is nothing to ask for."""
    assert not BadWords(VOCABULARY, ())
    assert not BadWords(VOCABULARY, ((),))
    assert BadWords(VOCABULARY, ((0,),))


def test_words_that_are_too_long_as_text_are_refused() -> None:
    """Few ids may be a lot of text; beyond the limit of word lists the request is refused, by name."""
    vocabulary = Vocabulary([b"x" * 1024], frozenset(), is_byte_level=True)
    fits = GenerationRequest(
        request_id=RequestId("r"), prompt_token_ids=(0,), max_new_tokens=1, stop_words=((0,) * 64,)
    )
    too_long = GenerationRequest(
        request_id=RequestId("r"), prompt_token_ids=(0,), max_new_tokens=1, bad_words=((0,) * 60, (0,) * 5)
    )

    assert check_words(fits, vocabulary) is None
    with pytest.raises(
        InvalidRequestError, match="`bad_words_list` is too long as text; limit 65536 bytes, given 66560"
    ):
        check_words(too_long, vocabulary)
