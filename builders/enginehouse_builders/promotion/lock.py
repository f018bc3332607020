"""One change at a time: a lock on the home folder that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from enginehouse_contract.errors import PromotionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_NAME: Final = "promotion.lock"


@contextmanager
def exclusive(home: Path, what: str) -> Iterator[None]:
    """Hold the lock while the block runs; raise :class:`PromotionError` naming the holder when another has it."""
    home.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(home / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another command"
            msg = f"{holder} is changing what is served from {home}; wait for it and try again."
            raise PromotionError(msg) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"`{what}` (pid {os.getpid()})".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
