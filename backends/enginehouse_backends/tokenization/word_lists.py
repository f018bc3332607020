"""Stop and bad words on the wire: row 0 their token ids, flat; row 1 where each ends, padded with -1.

NVIDIA's layout (``to_word_list_format`` of the original preprocessing model): no words give an array of [2, 0], an
empty word is skipped. Words are bounded in number and size, here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from enginehouse_contract.errors import InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from enginehouse_backends.tokenization.tokenizer import Tokenizer

MAX_WORDS: Final = 1024
MAX_WORD_BYTES: Final = 64 * 1024  # of all words together


def tokenize_words(tokenizer: Tokenizer, words: Sequence[bytes], name: str) -> list[tuple[int, ...]]:
    """Return the token ids of each word that is not empty, without special tokens around it.

    Raises :class:`InvalidRequestError` for too many or too long words and for invalid UTF-8, naming *name*.
    """
    if len(words) > MAX_WORDS:
        raise InvalidRequestError(refusal(name, "holds too many words", limit=MAX_WORDS, given=len(words)))
    if (num_bytes := sum(map(len, words))) > MAX_WORD_BYTES:
        limit = f"{MAX_WORD_BYTES} bytes"
        raise InvalidRequestError(refusal(name, "is too long", limit=limit, given=f"{num_bytes} bytes"))
    return [tuple(tokenizer.encode(word, name=name, add_special_tokens=False)) for word in words if word]


def encode_word_list(words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return words as [2, L]."""
    flat = [token_id for word in words for token_id in word]
    encoded = np.full((2, len(flat)), -1, np.int32)
    encoded[0] = flat
    encoded[1, : len(words)] = np.cumsum([len(word) for word in words])
    return encoded


def decode_word_list(array: NDArray[Any], name: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Read [2, L] back; raise :class:`InvalidRequestError` naming *name* when it is not such a list."""
    if array.ndim != 2 or array.shape[0] != 2:  # noqa: PLR2004 - the two rows
        raise InvalidRequestError(refusal(name, "must have the shape [2, length]", given=list(array.shape)))
    ends = [int(end) for end in array[1] if end != -1]
    ends = [end for end in ends if end > 0]
    if ends != sorted(ends) or (ends and ends[-1] > array.shape[1]):
        problem = "has offsets in row 1 that do not rise within row 0"
        raise InvalidRequestError(refusal(name, problem, limit=array.shape[1], given=ends))
    if len(ends) > MAX_WORDS:
        raise InvalidRequestError(refusal(name, "holds too many words", limit=MAX_WORDS, given=len(ends)))
    ids = array[0].tolist()
    words = tuple(tuple(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False) if start < end)
    for word in words:
        for token_id in word:
            if not 0 <= token_id < vocab_size:
                limit = f"0 to {vocab_size - 1}"
                raise InvalidRequestError(
                    refusal(name, "holds an id outside the vocabulary", limit=limit, given=token_id)
                )
    return words
