"""Stop and bad words over generated tokens, at text level: whatever token boundaries they fall on.

A word of ordinary tokens is the text of its tokens. A stop word matches when the generated text contains it; a bad word
bans every token that would complete it. Words that hold a special token, and all words under ``matching="tokens"``,
match by token ids alone, as NVIDIA's engine matches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import TokenIds
    from enginehouse_backends.tokenization.vocabulary import Vocabulary

WordMatching = Literal["text", "tokens"]


def split_words(
    vocabulary: Vocabulary, words: Iterable[TokenIds], matching: WordMatching
) -> tuple[dict[bytes, TokenIds], list[TokenIds]]:
    """Return the words that match as text, by their bytes, and those that match by ids."""
    by_text: dict[bytes, TokenIds] = {}
    by_ids: list[TokenIds] = []
    for word in words:
        text = b"".join(vocabulary.text_bytes_of(token_id) for token_id in word)
        if matching == "tokens" or not text or any(map(vocabulary.is_special, word)):
            by_ids.append(word)
        else:
            by_text.setdefault(text, word)
    return by_text, by_ids


class StopWords:
    """Watches one sequence's output for its stop words and its end id."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        words: Sequence[TokenIds],
        end_id: int | None,
        *,
        matching: WordMatching = "text",
    ) -> None:
        self._vocabulary = vocabulary
        self._end_id = end_id
        self._by_text, self._by_ids = split_words(vocabulary, words, matching)
        self._max_bytes = max(map(len, self._by_text), default=1) - 1
        self._max_ids = max(map(len, self._by_ids), default=0)
        self._tail = b""
        self._tail_ids: tuple[int, ...] = ()

    def push(self, token_id: int) -> TokenIds | None:
        """Add a token; return the stop word (or the end id, as a word) that it completes."""
        if token_id == self._end_id:
            return (token_id,)
        if self._by_ids:
            self._tail_ids = (*self._tail_ids, token_id)[-self._max_ids :]
            for word in self._by_ids:
                if self._tail_ids[-len(word) :] == word:
                    return word
        if self._by_text:
            seen = self._tail + self._vocabulary.text_bytes_of(token_id)
            for text, word in self._by_text.items():
                if text in seen:
                    return word
            self._tail = seen[-self._max_bytes :] if self._max_bytes else b""
        return None


class BadWords:
    """The tokens one sequence may not take next. The prompt's tail counts: a word may begin there."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        words: Sequence[TokenIds],
        prompt_token_ids: Sequence[int],
        *,
        matching: WordMatching = "text",
    ) -> None:
        self._vocabulary = vocabulary
        self._by_text, self._by_ids = split_words(vocabulary, words, matching)
        self._always = tuple(
            {token_id for text in self._by_text for token_id in vocabulary.ids_containing(text)}
            | {word[0] for word in self._by_ids if len(word) == 1}
        )
        self._longer_ids = [word for word in self._by_ids if len(word) > 1]
        self._max_bytes = max(map(len, self._by_text), default=1) - 1
        self._max_ids = max(map(len, self._longer_ids), default=1) - 1
        self._tail = b""
        self._tail_ids: tuple[int, ...] = ()
        for token_id in prompt_token_ids[-max(self._max_bytes, self._max_ids) :] if words else ():
            self.push(token_id)

    def __bool__(self) -> bool:
        return bool(self._by_text or self._by_ids)

    def push(self, token_id: int) -> None:
        """Add a token that was taken."""
        if self._longer_ids:
            self._tail_ids = (*self._tail_ids, token_id)[-self._max_ids :]
        if self._max_bytes:
            self._tail = (self._tail + self._vocabulary.text_bytes_of(token_id))[-self._max_bytes :]

    def banned_ids(self) -> NDArray[np.int32]:
        """Return the tokens that would complete a bad word now."""
        banned = set(self._always)
        for word in self._longer_ids:
            if self._tail_ids[len(self._tail_ids) - len(word) + 1 :] == word[:-1]:
                banned.add(word[-1])
        for text in self._by_text:
            for length in range(1, min(len(text), len(self._tail) + 1)):
                if self._tail.endswith(text[:length]):
                    banned.update(self._vocabulary.ids_with_prefix(text[length:]))
        return np.fromiter(banned, np.int32, len(banned))
