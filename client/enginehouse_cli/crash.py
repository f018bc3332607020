"""A file with what only developers want to read: the traceback of an error nobody expected."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from enginehouse_contract.errors import EnginehouseError
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator


def write_crash_log(error: BaseException) -> Path | None:
    """Write the traceback beside the other logs, else among the temporary files; return where, None if nowhere."""
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / name
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
            return path
    return None


def _folders() -> Iterator[Path]:
    with contextlib.suppress(EnginehouseError):
        yield load_settings().logs_dir
    yield Path(tempfile.gettempdir())
