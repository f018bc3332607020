"""The head of a GGUF file: metadata and the types of tensors, without the vocabulary and without any weight.

A plan must not take as long as a build, nor need a whole file: only the head is read, so that a file still being
downloaded can be planned for. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_HEAD_BYTES: Final = 256 << 20
_STRING, _ARRAY = 8, 9
_SCALARS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_KINDS: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 30: "BF16", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (arrays are left out), and by group how many values are stored in which type."""

    metadata: dict[str, Any]
    num_vocab_values: Counter[str]  # GGML type -> values of embedding and head
    num_matrix_values: Counter[str]  # the same of the layers' matrices
    vocab_size: int
    has_head: bool


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the head of a GGUF file.

    Raises :class:`ModelSourceError` for a file that is none, or ends within its head.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_HEAD_BYTES)
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read ({error.strerror or error}).") from error
    if data[:4] != _MAGIC:
        raise ModelSourceError(f"{path} is not a GGUF file: it begins with {data[:4]!r}.")
    try:
        return _Reader(data).header()
    except (struct.error, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ModelSourceError(f"{path} is damaged, or ends within its header ({error}); get it again.") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def header(self) -> GgufHeader:
        if (version := self._scalar("I")) not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            if (kind := self._scalar("I")) == _ARRAY:
                self._skip_array()
            else:
                metadata[name] = self._string() if kind == _STRING else self._scalar(_SCALARS[kind])
        groups: dict[str, Counter[str]] = {"vocab": Counter(), "matrix": Counter()}
        vocab_size, has_head = 0, False
        for _ in range(num_tensors):
            name = self._string()
            shape = [self._scalar("Q") for _ in range(self._scalar("I"))]
            kind = self._scalar("I")
            self._scalar("Q")
            if name == "token_embd.weight":
                vocab_size = shape[-1]
            has_head = has_head or name == "output.weight"
            is_vocab = name in {"token_embd.weight", "output.weight"}
            if len(shape) > 1:
                groups["vocab" if is_vocab else "matrix"][_KINDS.get(kind, f"type {kind}")] += prod(shape)
        return GgufHeader(metadata, groups["vocab"], groups["matrix"], vocab_size, has_head)

    def _skip_array(self) -> None:
        item_kind, length = self._scalar("I"), self._scalar("Q")
        if item_kind == _ARRAY:
            raise ValueError("arrays of arrays are not read")
        if item_kind != _STRING:
            self._at += length * struct.calcsize(f"<{_SCALARS[item_kind]}")
            return
        data, at = self._data, self._at
        for _ in range(length):  # the hot loop: hundreds of thousands of tokens and merges
            at += 8 + int.from_bytes(data[at : at + 8], "little")
            if at > len(data):
                raise ValueError("an array of strings ends beyond the file")
        self._at = at

    def _string(self) -> str:
        length = self._scalar("Q")
        if self._at + length > len(self._data):
            raise ValueError("a string ends beyond the file")
        text = self._data[self._at : self._at + length].decode()
        self._at += length
        return text

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self._data, self._at)[0]
        self._at += struct.calcsize(f"<{code}")
        return value
