"""The exact bytes of every token, read from a ``tokenizer.json``.

Text is what the joined bytes say; tokens may split characters. Two families are known: byte-level BPE (GPT-2's
printable stand-in for each byte) and SentencePiece ("▁" for a space, ``<0xNN>`` for a byte).
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from enginehouse_contract.errors import BuildIntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_PIECE: Final = "\u2581"
_KNOWN_MODELS: Final = ("BPE", "Unigram")


class Vocabulary:
    """Bytes of tokens 0 to ``size - 1``; ids without a token (a padded head) have none.

    Special tokens have bytes to be shown, but take no part in matching words.
    """

    def __init__(self, token_bytes: Sequence[bytes], special_ids: frozenset[int], *, is_byte_level: bool) -> None:
        self.is_byte_level = is_byte_level
        self.max_token_bytes = max(map(len, token_bytes), default=0)
        self._token_bytes = tuple(token_bytes)
        self._special_ids = special_ids
        ordinary = [(text, index) for index, text in enumerate(token_bytes) if text and index not in special_ids]
        ordinary.sort()
        self._sorted_bytes = [text for text, _ in ordinary]
        self._sorted_ids = np.array([index for _, index in ordinary], np.int32)
        self._joined_bytes = b"".join(self._sorted_bytes)
        self._starts = list(itertools.accumulate(map(len, self._sorted_bytes), initial=0))  # in _joined_bytes
        self.ids_containing = lru_cache(maxsize=1024)(self._ids_containing)
        self.ids_with_prefix = lru_cache(maxsize=4096)(self._ids_with_prefix)

    @classmethod
    def from_tokenizer_json(cls, path: Path, vocab_size: int) -> Vocabulary:
        """Read *path*; ids from the tokenizer's end to *vocab_size* are empty.

        Raises :class:`BuildIntegrityError` when the file cannot be read, holds a kind of tokenizer whose tokens are
        not exact bytes (WordPiece, WordLevel), or names ids beyond *vocab_size*.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            kind = raw["model"].get("type")
            pieces = _pieces_of(raw["model"]["vocab"])
            added = {int(token["id"]): token for token in raw.get("added_tokens") or ()}
            contents = {index: str(token["content"]) for index, token in added.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"{path} is not a readable tokenizer.json ({type(error).__name__}: {error}); rebuild the engine."
            raise BuildIntegrityError(msg) from error
        if kind is not None and kind not in _KNOWN_MODELS:
            msg = f"{path} holds a {kind} tokenizer; supported are {' and '.join(_KNOWN_MODELS)}."
            raise BuildIntegrityError(msg)
        if any(not 0 <= index < vocab_size for index in (*pieces.values(), *added)):
            highest = max((*pieces.values(), *added))
            msg = f"{path} holds token ids up to {highest}, but the model's vocabulary ends at {vocab_size - 1}."
            raise BuildIntegrityError(msg)
        is_byte_level = _uses(raw.get("decoder"), "ByteLevel") or _uses(raw.get("pre_tokenizer"), "ByteLevel")
        token_bytes = [b""] * vocab_size
        for piece, index in pieces.items():
            token_bytes[index] = _byte_level_bytes(piece) if is_byte_level else _sentencepiece_bytes(piece)
        for index, content in contents.items():
            token_bytes[index] = content.encode() if is_byte_level else _sentencepiece_bytes(content)
        special = frozenset(index for index, token in added.items() if token.get("special"))
        return cls(token_bytes, special, is_byte_level=is_byte_level)

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self._token_bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        return self._token_bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a control token rather than text."""
        return token_id in self._special_ids

    def text_bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text: none for a special one."""
        return b"" if token_id in self._special_ids else self._token_bytes[token_id]

    def segment(self, text: bytes) -> tuple[int, ...] | None:
        """Return ordinary tokens whose joined bytes are *text*, the longest first; None where there are none such."""
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self.max_token_bytes), start, -1):
                # Of several tokens with the same bytes take the last: a piece comes after the byte it may stand for.
                index = bisect.bisect_right(self._sorted_bytes, text[start:end]) - 1
                if index >= 0 and self._sorted_bytes[index] == text[start:end]:
                    token_ids.append(int(self._sorted_ids[index]))
                    start = end
                    break
            else:
                return None
        return tuple(token_ids)

    def _ids_with_prefix(self, prefix: bytes) -> NDArray[np.int32]:
        """Ordinary tokens whose bytes begin with *prefix*."""
        start = bisect.bisect_left(self._sorted_bytes, prefix)
        end = bisect.bisect_right(self._sorted_bytes, prefix + b"\xff" * self.max_token_bytes, lo=start)
        return self._sorted_ids[start:end]

    def _ids_containing(self, part: bytes) -> NDArray[np.int32]:
        """Ordinary tokens whose bytes contain *part*, which is not empty."""
        indices = []
        position = self._joined_bytes.find(part)
        while position >= 0:
            index = bisect.bisect_right(self._starts, position) - 1
            end = self._starts[index + 1]
            if position + len(part) <= end:
                indices.append(index)
                position = self._joined_bytes.find(part, end)
            else:  # found across the border of two tokens
                position = self._joined_bytes.find(part, position + 1)
        return self._sorted_ids[indices]


def _pieces_of(vocab: Any) -> dict[str, int]:
    """A BPE vocabulary is a map; a Unigram one is a list of [piece, score]."""
    if isinstance(vocab, list):
        return {str(piece): index for index, (piece, _) in enumerate(vocab)}
    return {str(piece): int(index) for piece, index in vocab.items()}


def _uses(component: Any, kind: str) -> bool:
    """Whether a tokenizer component is, or contains, one of *kind*."""
    if isinstance(component, dict):
        return component.get("type") == kind or any(_uses(value, kind) for value in component.values())
    return isinstance(component, list) and any(_uses(value, kind) for value in component)


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's map from printable stand-ins back to bytes (openai/gpt-2, ``encoder.py``)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    missing = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(missing)})
    return table


def _byte_level_bytes(piece: str) -> bytes:
    table = _byte_of_character()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE_PIECE, " ").encode()
