"""Opening GGUF files, damaged ones included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC: Final = b"GGUF"


class _Reader(gguf.GGUFReader):
    """The package's reader, made fast and safe where it takes bytes from the file.

    Slices of a memory map cost ten times those of a plain array, and a short read would pass for an empty value.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        self.data: Any = self.data.view(np.ndarray)
        num_bytes = int(np.dtype(dtype).itemsize) * int(count)
        if int(offset) + num_bytes > self.data.size:
            raise EOFError(f"{num_bytes} bytes wanted at {int(offset)}, the file has {self.data.size}")
        return super()._get(offset, dtype, count, override_order)


def open_gguf(path: Path) -> Any:
    """Return a :class:`gguf.GGUFReader`.

    Raises :class:`ModelSourceError` when *path* is no GGUF file, is damaged, truncated, or one part of several.
    """
    try:
        with path.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read ({error.strerror or error}).") from error
    if magic != _MAGIC:
        raise ModelSourceError(f"{path} is not a GGUF file: it begins with {magic!r}.")
    try:
        reader = _Reader(path)
    except Exception as error:  # the reader raises whatever it makes of a damaged file
        raise ModelSourceError(f"{path} is damaged or truncated ({type(error).__name__}: {error}).") from error
    if not reader.tensors:
        raise ModelSourceError(f"{path} holds no tensors.")
    split = reader.fields.get("split.count")
    if split is not None and int(split.contents()) > 1:
        raise ModelSourceError(f"{path} is one of {split.contents()} parts; join them with `llama-gguf-split --merge`.")
    return reader
