"""Digests of model files, remembered by path, size and time, so that a cache hit need not read gigabytes again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from enginehouse_contract.errors import ModelSourceError
from enginehouse_contract.manifest import sha256_of_file


def source_digest(path: Path, cache_file: Path) -> str:
    """Return the SHA-256 of a file, or of a folder's files with their names.

    Raises :class:`ModelSourceError` when something cannot be read.
    """
    try:
        if path.is_file():
            return _file_digest(path, cache_file)
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        lines = [f"{file.name} {_file_digest(file, cache_file)}" for file in files]
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read ({error.strerror or error}).") from error
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _file_digest(path: Path, cache_file: Path) -> str:
    status = path.stat()
    key = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(cache_file.read_text(encoding="utf-8"))
    if key not in known:
        known[key] = sha256_of_file(path)
        _write_atomically(cache_file, json.dumps(known, indent=0))
    return known[key]


def _write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step; a cache that cannot be written is only slower."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).replace(path)
