"""What has passed on this machine since anyone asked: time and energy counters shared by every engine process on it.

Several engines on one machine (two releases during a promotion, a draft and a target model) read the same counters and
the same clock. Each interval must be taken by one of them, or machine time and energy would be counted twice. The last
reading therefore lies in a file that all of them lock, read and replace; what passes while no engine runs is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

_CLOCK_FILE: Final = "machine-clock"
_PRESENCE_FILE: Final = "machine-clock.engines"
_INT64: Final = 8


@dataclass(slots=True)
class Reading:
    """The last reading; change it to the new one inside :meth:`MachineClock.exclusive`."""

    at_ns: int
    counters: list[int] = field(default_factory=list)


class MachineClock(Protocol):
    """Keeps the last reading."""

    def exclusive(self) -> AbstractContextManager[Reading]:
        """Give out the last reading for the length of a block; its changes are kept."""
        ...

    def now_ns(self) -> int:
        """Read the clock."""
        ...


class OwnClock:
    """The clock of a process that has the machine to itself."""

    def __init__(self, counters: Sequence[int] = (), clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.now_ns = clock_ns
        self._reading = Reading(clock_ns(), list(counters))

    @contextmanager
    def exclusive(self) -> Iterator[Reading]:
        """See :class:`MachineClock`."""
        yield self._reading


class SharedClock:
    """The clock of all processes that name the same folder; monotonic time is one for the whole machine on Linux.

    Args:
        folder: Where the reading lies; created if need be.
        counters: The counters as they are now: where the first process begins.
    """

    now_ns = staticmethod(time.monotonic_ns)

    def __init__(self, folder: Path, counters: Sequence[int] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._num_counters = len(counters)
        self._file = os.open(folder / _CLOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        self._presence = os.open(folder / _PRESENCE_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # two that start at once must not both think they are first
        try:
            if self._is_alone() or os.fstat(self._file).st_size != self._num_bytes:
                self._write(Reading(self.now_ns(), list(counters)))
            fcntl.flock(self._presence, fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave: the last one out makes the next first again."""
        os.close(self._presence)
        os.close(self._file)

    @contextmanager
    def exclusive(self) -> Iterator[Reading]:
        """See :class:`MachineClock`."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            values = struct.unpack(f"={1 + self._num_counters}q", os.pread(self._file, self._num_bytes, 0))
            reading = Reading(values[0], list(values[1:]))
            yield reading
            self._write(reading)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def _num_bytes(self) -> int:
        return _INT64 * (1 + self._num_counters)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write(self, reading: Reading) -> None:
        content = struct.pack(f"={1 + self._num_counters}q", reading.at_ns, *reading.counters)
        os.ftruncate(self._file, len(content))
        os.pwrite(self._file, content, 0)
