"""Reads GGUF files, damaged ones included. Format: ggml-org/ggml, docs/gguf.md.

The package `gguf` knows the types and dequantizes; its reader takes seconds for a large vocabulary, where this one,
which every build starts with, takes a fraction of one.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Final = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)  # value type -> struct code
_DEFAULT_ALIGNMENT: Final = 32
_MAX_NUM_DIMENSIONS: Final = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape, rows first, and its bytes as they are in the file."""

    shape: tuple[int, ...]
    kind: str  # GGML's name of the type: "F32", "Q4_1", ...
    raw: NDArray[np.uint8]


class GgufFile:
    """Metadata and tensors of a file; raises :class:`ModelSourceError` where it is not GGUF, damaged or truncated."""

    def __init__(self, path: Path) -> None:
        try:
            mapped = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise ModelSourceError(f"{path} cannot be read ({error.strerror or error}).") from error
        self._data: NDArray[np.uint8] = mapped.view(np.ndarray)
        self._at = 0
        if (magic := self._data[:4].tobytes()) != _MAGIC:
            raise ModelSourceError(f"{path} is not a GGUF file: it begins with {magic!r}.")
        try:
            self._read()
        except (EOFError, ValueError, KeyError, OverflowError, RecursionError, MemoryError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ModelSourceError(f"{path} is damaged or truncated ({reason}, near byte {self._at}).") from error

    def _read(self) -> None:
        self._take(len(_MAGIC))
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._string()
            self.metadata[name] = self._value(self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._at // alignment) * alignment if isinstance(alignment, int) and alignment > 0 else self._at
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            self._at = start + offset
            block, num_block_bytes = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(f"{name}: rows of {shape[-1]} values are not whole blocks of {kind.name}")
            raw = self._take(math.prod(shape) // block * num_block_bytes)
            self.tensors[name] = GgufTensor(shape, kind.name, raw)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], Any, int]:
        name, num_dimensions = self._string(), self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_NUM_DIMENSIONS:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        shape = tuple(reversed([self._scalar("Q") for _ in range(num_dimensions)]))
        return name, shape, gguf.GGMLQuantizationType(self._scalar("I")), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item_kind, length = self._scalar("I"), self._scalar("Q")
        if item_kind in {_STRING, _ARRAY}:
            return [self._value(item_kind) for _ in range(length)]
        code = _SCALARS[item_kind]
        return self._take(length * struct.calcsize(f"<{code}")).view(f"<{code}").tolist()

    def _string(self) -> str:
        return self._take(self._scalar("Q")).tobytes().decode()

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")).tobytes())[0]

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        end = self._at + num_bytes
        if end > self._data.size:
            raise EOFError(f"{num_bytes} bytes wanted, the file has {self._data.size}")
        taken = self._data[self._at : end]
        self._at = end
        return taken
