"""The automaton against looking at every word at every position."""

from __future__ import annotations

import random

import pytest

from enginehouse_backends.tokenization.word_automaton import WordAutomaton


def random_words(rng: random.Random) -> list[bytes]:
    """Return words over few letters, so that they overlap and contain each other."""
    return ["".join(rng.choices("ab", k=rng.randint(0, 5))).encode() for _ in range(rng.randint(0, 6))]


@pytest.mark.parametrize("seed", range(200))
def test_words_depth_and_continuations_are_the_naive_ones(seed: int) -> None:
    """At each position: the longest word that ends there, the longest that has begun, what would complete any."""
    rng = random.Random(seed)
    words = random_words(rng)
    automaton = WordAutomaton(words)
    state = 0
    text = b""
    for byte in "".join(rng.choices("abc", weights=[5, 5, 1], k=40)).encode():
        state = automaton.step(state, byte)
        text += bytes([byte])
        ended = [word for word in words if word and text.endswith(word)]
        begun = [k for word in words for k in range(1, len(word) + 1) if text.endswith(word[:k])]
        missing = {w[k:] for w in words for k in range(1, len(w)) if text.endswith(w[:k])}
        shortest = {rest for rest in missing if not any(rest != m and rest.startswith(m) for m in missing)}
        found = {bytes(rest) for rest in automaton.continuations(state, lambda _: True)}

        assert automaton.word(state) == max(ended, key=len, default=None)
        assert automaton.depth(state) == max(begun, default=0)
        assert shortest <= found <= missing
        next_only = {rest for rest in missing if len(rest) == 1}
        assert {bytes(rest) for rest in automaton.continuations(state, lambda _: False)} == next_only


def test_empty_words_are_ignored() -> None:
    """An automaton of no words, or of empty ones, is false and finds nothing."""
    for words in ([], [""]):
        automaton = WordAutomaton(words)

        assert not automaton
        assert automaton.step(0, "a") == 0
        assert automaton.word(0) is None
        assert list(automaton.continuations(0, lambda _: True)) == []
