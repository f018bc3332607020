"""Stop and bad words over generated tokens, at text level: whatever token boundaries they fall on.

A word of ordinary tokens is the text of its tokens. A stop word matches when the generated text contains it; a bad word
bans every token that would complete it. Special tokens add nothing to the text. Words that hold one, and all words
under ``matching="tokens"``, match by token ids alone, as NVIDIA's engine matches.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from enginehouse_backends.tokenization.word_automaton import WordAutomaton
from enginehouse_backends.tokenization.word_lists import MAX_WORD_BYTES
from enginehouse_contract.errors import InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Self

    from enginehouse_backends.engine.request import GenerationRequest, TokenIds
    from enginehouse_backends.tokenization.vocabulary import Vocabulary

WordMatching = Literal["text", "tokens"]

_MAX_STATES_CACHED = 1024
_FEW_WORDS = 64  # looked for one by one in the whole vocabulary; more are looked for together


def check_words(request: GenerationRequest, vocabulary: Vocabulary) -> None:
    """Raise :class:`InvalidRequestError` when the text of a request's stop or bad words is too long to watch for."""
    for name, words in (("stop_words_list", request.stop_words), ("bad_words_list", request.bad_words)):
        num_bytes = sum(len(vocabulary.bytes_of(token_id)) for word in words for token_id in word)
        if num_bytes > MAX_WORD_BYTES:
            limit, given = f"{MAX_WORD_BYTES} bytes", f"{num_bytes} bytes"
            raise InvalidRequestError(refusal(name, "is too long as text", limit=limit, given=given))


class _WordSet:
    """Words ready to be matched, by text and by ids. Its state is a pair, one number for each."""

    def __init__(self, vocabulary: Vocabulary, words: Iterable[TokenIds], matching: WordMatching) -> None:
        self._vocabulary = vocabulary
        self._word_of_text: dict[bytes, TokenIds] = {}
        by_ids: list[TokenIds] = []
        for word in words:
            text = b"".join(vocabulary.text_bytes_of(token_id) for token_id in word)
            if matching == "tokens" or not text or any(map(vocabulary.is_special, word)):
                by_ids.append(word)
            else:
                self._word_of_text.setdefault(text, word)
        self._by_text = WordAutomaton(self._word_of_text)
        self._by_ids = WordAutomaton(by_ids)
        self.max_length = max(map(len, (*self._word_of_text, *by_ids)), default=0)  # in bytes, or in ids
        self._single_ids = [word[0] for word in by_ids if len(word) == 1]
        self.banned_ids = lru_cache(maxsize=_MAX_STATES_CACHED)(self._banned_ids)

    def __bool__(self) -> bool:
        return bool(self._by_text or self._by_ids)

    def step(self, text_state: int, ids_state: int, token_id: int) -> tuple[int, int, TokenIds | None]:
        """Return the state after a token, and the word that it completes.

        Of several, one by ids comes before one by text, then the one that ends first, then the longest.
        """
        word: TokenIds | None = None
        if self._by_ids:
            ids_state = self._by_ids.step(ids_state, token_id)
            word = self._by_ids.word(ids_state)
        if self._by_text:
            text_state, text = self._step_text(text_state, token_id)
            if word is None and text is not None:
                word = self._word_of_text[text]
        return text_state, ids_state, word

    def _step_text(self, state: int, token_id: int) -> tuple[int, bytes | None]:
        first: bytes | None = None
        for byte in self._vocabulary.text_bytes_of(token_id):
            state = self._by_text.step(state, byte)
            if first is None:
                first = self._by_text.word(state)
        return state, first

    def _banned_ids(self, text_state: int, ids_state: int) -> NDArray[np.int32]:
        """Tokens that would complete a word: that contain one, or begin with the rest of one that has begun."""
        if text_state or ids_state:
            parts = [self.banned_ids(0, 0)]
            rests = self._by_text.continuations(text_state, lambda rest: len(self._ids_with_prefix(rest)) > 0)
            parts += map(self._ids_with_prefix, rests)
            next_ids = self._by_ids.continuations(ids_state, lambda _: False)
            parts += [np.array(next_id, np.int32) for next_id in next_ids]
        else:
            parts = [self._ids_with_whole_words(), np.array(self._single_ids, np.int32)]
        return np.unique(np.concatenate(parts))

    def _ids_with_prefix(self, prefix: tuple[Hashable, ...]) -> NDArray[np.int32]:
        return self._vocabulary.ids_with_prefix(bytes(cast("tuple[int, ...]", prefix)))

    def _ids_with_whole_words(self) -> NDArray[np.int32]:
        vocabulary = self._vocabulary
        if len(self._word_of_text) <= _FEW_WORDS:
            parts = [vocabulary.ids_containing(text) for text in self._word_of_text]
            return np.concatenate([np.empty(0, np.int32), *parts])
        found = (token_id for token_id in range(vocabulary.size) if self._step_text(0, token_id)[1] is not None)
        return np.fromiter(found, np.int32)


@lru_cache(maxsize=4)
def _word_set(vocabulary: Vocabulary, words: Sequence[TokenIds], matching: WordMatching) -> _WordSet:
    """Sequences of one request share their words, and so do requests that come one after the other."""
    return _WordSet(vocabulary, words, matching)


class StopWords:
    """Watches one sequence's output for its stop words and its end id."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        words: tuple[TokenIds, ...],
        end_id: int | None,
        *,
        matching: WordMatching = "text",
    ) -> None:
        self._words = _word_set(vocabulary, words, matching)
        self._end_id = end_id
        self._text_state = self._ids_state = 0

    def copy(self) -> Self:
        """Return a watch that goes on from here on its own."""
        return copy.copy(self)

    def push(self, token_id: int) -> TokenIds | None:
        """Add a token; return the stop word (or the end id, as a word) that it completes."""
        self._text_state, self._ids_state, word = self._words.step(self._text_state, self._ids_state, token_id)
        return (token_id,) if token_id == self._end_id else word


class BadWords:
    """The tokens one sequence may not take next. The prompt's tail counts: a word may begin there."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        words: tuple[TokenIds, ...],
        prompt_token_ids: Sequence[int] = (),
        *,
        matching: WordMatching = "text",
    ) -> None:
        self._words = _word_set(vocabulary, words, matching)
        self._text_state = self._ids_state = 0
        for token_id in prompt_token_ids[-self._words.max_length :] if self._words else ():
            self.push(token_id)

    def __bool__(self) -> bool:
        return bool(self._words)

    def copy(self) -> Self:
        """Return one that goes on from here on its own."""
        return copy.copy(self)

    def push(self, token_id: int) -> None:
        """Add a token that was taken."""
        self._text_state, self._ids_state, _ = self._words.step(self._text_state, self._ids_state, token_id)

    def banned_ids(self) -> NDArray[np.int32]:
        """Return the tokens that would complete a bad word now, rising."""
        return self._words.banned_ids(self._text_state, self._ids_state)
