"""Token ids to text as they come: complete characters only, and joined deltas equal to decoding the whole."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from enginehouse_backends.tokenization.vocabulary import Vocabulary

_MAX_CHARACTER_BYTES: Final = 4
_CONTINUATION: Final = 0x80  # the upper two bits of every byte of a character but its first


def token_bytes(vocabulary: Vocabulary, token_id: int, *, skip_special_tokens: bool) -> bytes:
    """Return what a token adds to the text."""
    return vocabulary.text_bytes_of(token_id) if skip_special_tokens else vocabulary.bytes_of(token_id)


def decode_tokens(vocabulary: Vocabulary, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
    """Decode a whole sequence; invalid bytes become U+FFFD.

    A SentencePiece text that begins with a special token (BOS) loses the dummy space that its tokenizer put in front.
    """
    token_ids = list(token_ids)
    parts = [token_bytes(vocabulary, token_id, skip_special_tokens=skip_special_tokens) for token_id in token_ids]
    text = b"".join(parts).decode("utf-8", "replace")
    starts_prompt = bool(token_ids) and vocabulary.is_special(token_ids[0]) and skip_special_tokens
    return text.removeprefix(" ") if starts_prompt and not vocabulary.is_byte_level else text


class IncrementalDetokenizer:
    """Decodes one sequence piece by piece, in time linear in its length; holds back the start of a character."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became complete with these tokens."""
        parts = (
            token_bytes(self._vocabulary, token_id, skip_special_tokens=self._skip_special_tokens)
            for token_id in token_ids
        )
        return self._decoder.decode(b"".join(parts))

    def flush(self) -> str:
        """Return what was held back, once no more will come: an incomplete character shows as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def complete_prefix_length(vocabulary: Vocabulary, token_ids: Sequence[int]) -> int:
    """Return how many leading tokens end with a complete character, so that they can be decoded on their own.

    Bytes that cannot be the start of a character do not hold anything back.
    """
    # Walk back token by token until the rest has no unfinished character at its end.
    for count in range(len(token_ids), 0, -1):
        if not _ends_in_unfinished_character(vocabulary, token_ids[:count]):
            return count
    return 0


def _ends_in_unfinished_character(vocabulary: Vocabulary, token_ids: Sequence[int]) -> bool:
    tail = b""
    for token_id in reversed(token_ids):
        tail = vocabulary.text_bytes_of(token_id) + tail
        if len(tail) >= _MAX_CHARACTER_BYTES:
            break
    tail = tail[-_MAX_CHARACTER_BYTES:]
    for start in range(len(tail) - 1, -1, -1):
        byte = tail[start]
        if byte & 0xC0 != _CONTINUATION:
            return _is_unfinished(tail[start:])
    return False


def _is_unfinished(character: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(character) == ""
