"""Reads one safetensors file, bfloat16 included, which numpy lacks. Format: huggingface/safetensors, README."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from enginehouse_builders.cpu.source import FloatType

_FLOAT_TYPES: Final[dict[str, FloatType]] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_NUMPY_TYPES: Final = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
_NUM_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    shape: tuple[int, ...]
    begin: int  # in bytes, from the end of the header
    end: int


class SafetensorsFile:
    """The tensors of one file, read when asked for; raises :class:`ModelSourceError` for a damaged one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        num_bytes, header = self._read_header()
        try:
            self._entries = {
                name: _Entry(entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError) as error:
            raise ModelSourceError(f"{path} is not a safetensors file ({type(error).__name__}: {error}).") from error
        end = self._start + max((entry.end for entry in self._entries.values()), default=0)
        if num_bytes < end:
            raise ModelSourceError(f"{path} is truncated: {num_bytes} bytes, its tensors need {end}.")
        self.names = frozenset(self._entries)

    def float_type(self, name: str) -> FloatType:
        """Return the type of a tensor's numbers; raise :class:`ModelSourceError` for one that is not known."""
        kind = self._entries[name].kind
        if kind not in _FLOAT_TYPES:
            raise ModelSourceError(f"{self._path}: {name} has the type {kind}; known: {', '.join(_FLOAT_TYPES)}.")
        return _FLOAT_TYPES[kind]

    def values(self, name: str) -> NDArray[np.float32]:
        """Return a tensor in float32; bfloat16 is float32's upper half."""
        float_type, entry = self.float_type(name), self._entries[name]
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._start + entry.begin)
                raw = stream.read(entry.end - entry.begin)
            numbers: NDArray[Any] = np.frombuffer(raw, _NUMPY_TYPES[float_type]).reshape(entry.shape)
        except OSError as error:
            raise ModelSourceError(f"{self._path} cannot be read ({error.strerror or error}).") from error
        except ValueError as error:
            raise ModelSourceError(f"{self._path} is damaged: {name} does not fill {entry.shape}.") from error
        if float_type == "bf16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.astype(np.float32)

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        """The file's size and what it says of its tensors."""
        try:
            with self._path.open("rb") as stream:
                num_bytes = self._path.stat().st_size
                num_header_bytes = int.from_bytes(stream.read(_NUM_LENGTH_BYTES), "little")
                self._start = _NUM_LENGTH_BYTES + num_header_bytes
                header = json.loads(stream.read(num_header_bytes)) if self._start <= num_bytes else None
        except OSError as error:
            raise ModelSourceError(f"{self._path} cannot be read ({error.strerror or error}).") from error
        except ValueError as error:
            raise ModelSourceError(f"{self._path} is not a safetensors file ({error}).") from error
        if not isinstance(header, dict):
            raise ModelSourceError(f"{self._path} is not a safetensors file, or is truncated to {num_bytes} bytes.")
        return num_bytes, header
