"""Digests of model files, remembered by path, size and time, so that a cache hit need not read gigabytes again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from enginehouse_contract.errors import ModelSourceError
from enginehouse_contract.manifest import sha256_of_file


def source_digest(path: Path, cache_file: Path) -> str:
    """Return the SHA-256 of a file, or of the names and digests of a folder's files.

    Raises :class:`ModelSourceError` when something cannot be read.
    """
    try:
        if path.is_file():
            return _file_digest(path, cache_file)
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        lines = [f"{_file_digest(file, cache_file)} {file.name}\n" for file in files]
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read ({error.strerror or error}).") from error
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_digest(path: Path, cache_file: Path) -> str:
    status = path.stat()
    key, state = str(path.resolve()), [status.st_size, status.st_mtime_ns]
    known = _read(cache_file)
    if key in known and known[key][:2] == state:
        return str(known[key][2])
    sha256 = sha256_of_file(path)
    _write_atomically(cache_file, json.dumps({**_read(cache_file), key: [*state, sha256]}, indent=0))
    return sha256


def _read(cache_file: Path) -> dict[str, list[Any]]:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(cache_file.read_text(encoding="utf-8"))
        if isinstance(known, dict):
            return known
    return {}


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step; a cache that cannot be written is only slower."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).replace(path)
