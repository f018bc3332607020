"""Stop and bad words on the wire: row 0 their token ids, flat; row 1 where each ends, padded with -1.

NVIDIA's layout (``to_word_list_format`` of the original preprocessing model): no words give an array of [2, 0], an
empty word is skipped. Words are bounded in number and size, here and nowhere else.
"""

from __future__ import annotations

import itertools
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
    """Return the token ids of each word that is not empty: ids whose joined bytes are the word's.

    A word that is a special token's text becomes its id. The tokenizer's own ids are taken where they say the word and
    nothing else; SentencePiece puts a space before it, so there the longest tokens that spell the word are taken.

    Raises :class:`InvalidRequestError` for too many or too long words and for invalid UTF-8, naming *name*.
    """
    if len(words) > MAX_WORDS:
        raise InvalidRequestError(refusal(name, "holds too many words", limit=MAX_WORDS, given=len(words)))
    if (num_bytes := sum(map(len, words))) > MAX_WORD_BYTES:
        limit, given = f"{MAX_WORD_BYTES} bytes", f"{num_bytes} bytes"
        raise InvalidRequestError(refusal(name, "is too long", limit=limit, given=given))
    return [_tokenize_word(tokenizer, word, name) for word in words if word]


def _tokenize_word(tokenizer: Tokenizer, word: bytes, name: str) -> tuple[int, ...]:
    token_ids = tuple(tokenizer.encode(word, name=name, add_special_tokens=False))
    if (special_id := tokenizer.special_id_of(word.decode())) is not None:
        return (special_id,)
    vocabulary = tokenizer.vocabulary
    if b"".join(map(vocabulary.bytes_of, token_ids)) == word:
        return token_ids
    return vocabulary.segment(word) or token_ids


def encode_word_list(words: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return words as [2, L]; empty ones are left out."""
    words = [word for word in words if word]
    flat = [token_id for word in words for token_id in word]
    encoded = np.full((2, len(flat)), -1, np.int32)
    encoded[0] = flat
    encoded[1, : len(words)] = np.cumsum([len(word) for word in words])
    return encoded


def decode_word_list(array: NDArray[Any], name: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Read [2, L] back, empty words left out.

    Raises :class:`InvalidRequestError` naming *name* when it is not such a list, or one beyond the limits above.
    """
    if array.ndim != 2 or array.shape[0] != 2:  # noqa: PLR2004 - the two rows
        raise InvalidRequestError(refusal(name, "must have the shape [2, length]", given=list(array.shape)))
    num_ids = array.shape[1]
    if num_ids > MAX_WORD_BYTES:  # a token is a byte at least
        raise InvalidRequestError(refusal(name, "is too long", limit=MAX_WORD_BYTES, given=num_ids))
    ends = array[1][array[1] != -1]
    if len(ends) and (ends.min() < 0 or ends.max() > num_ids or (np.diff(ends) < 0).any()):
        problem = "has offsets in row 1 that do not rise within row 0"
        raise InvalidRequestError(refusal(name, problem, limit=num_ids, given=ends.tolist()))
    if len(ends) > MAX_WORDS:
        raise InvalidRequestError(refusal(name, "holds too many words", limit=MAX_WORDS, given=len(ends)))
    ids, offsets = array[0].tolist(), [0, *ends.tolist()]
    words = tuple(tuple(ids[start:end]) for start, end in itertools.pairwise(offsets) if start < end)
    for token_id in itertools.chain.from_iterable(words):
        if not 0 <= token_id < vocab_size:
            limit = f"0 to {vocab_size - 1}"
            raise InvalidRequestError(refusal(name, "holds an id outside the vocabulary", limit=limit, given=token_id))
    return words
