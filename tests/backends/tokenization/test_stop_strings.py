"""Stop strings over streamed text, against a search over the whole."""

from __future__ import annotations

import random

import pytest

from enginehouse_backends.tokenization.stop_strings import StopAutomaton, StopStrings


def naive_stop(text: str, words: list[str]) -> tuple[str, str | None]:
    """Cut *text* before the stop string that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [word for word in words if word and text[:end].endswith(word)]
        if ending:
            word = max(ending, key=len)
            return text[: end - len(word)], word
    return text, None


def run(chunks: list[str], words: list[str], *, include_stop: bool = False) -> tuple[list[str], str | None]:
    """Push *chunks* until a stop; return what was shown and the stop string."""
    stops = StopStrings(StopAutomaton(words), include_stop=include_stop)
    shown = []
    for chunk in chunks:
        text, stop = stops.push(chunk)
        shown.append(text)
        if stop is not None:
            return shown, stop
    shown.append(stops.flush())
    return shown, None


@pytest.mark.parametrize("seed", range(40))
def test_any_chunking_gives_the_text_before_the_first_stop(seed: int) -> None:
    """Over random texts, stop strings and cuts, the shown text is the naive one and no part of the stop leaks."""
    rng = random.Random(seed)
    for _ in range(50):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randrange(40)))
        words = ["".join(rng.choice("ab\n") for _ in range(rng.randrange(5))) for _ in range(rng.randrange(4))]
        chunks, rest = [], text
        while rest:
            cut = rng.randrange(1, 6)
            chunks.append(rest[:cut])
            rest = rest[cut:]
        shown, stop = run(chunks, words)

        assert ("".join(shown), stop) == naive_stop(text, words)
        assert naive_stop(text, words)[0].startswith("".join(shown))


def test_text_that_may_become_a_stop_is_held_back() -> None:
    """`EN` waits while it may become `END`, and appears when it does not."""
    shown, stop = run(["the E", "N", "T", "END!"], ["END"])

    assert shown == ["the ", "", "ENT", ""]
    assert stop == "END"


def test_the_stop_string_can_be_included() -> None:
    """With include_stop the text ends with the stop string and nothing after it."""
    shown, stop = run(["ab", "cd", "ef"], ["cde"], include_stop=True)

    assert "".join(shown) == "abcde"
    assert stop == "cde"


def test_without_stop_strings_nothing_is_held() -> None:
    """No words, or only empty ones, pass every chunk through at once."""
    assert run(["a", "b"], []) == (["a", "b", ""], None)
    assert run(["a", "b"], [""]) == (["a", "b", ""], None)


def test_overlapping_strings() -> None:
    """A string inside another's beginning is found although the longer one was being followed."""
    assert run(["abcabd"], ["abcabx", "cab"]) == (["ab"], "cab")
    assert run(["xaab"], ["aaaa", "ab"]) == (["xa"], "ab")
