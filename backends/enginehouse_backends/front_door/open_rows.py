"""How many rows each release still has to answer: a release with none may be unloaded."""

from __future__ import annotations

import threading
from collections import Counter


class OpenRows:
    """Counts rows from the moment their release was chosen until they ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def begin(self, release: str, num_rows: int) -> None:
        """Count rows for which *release* was chosen."""
        with self._lock:
            self._counts[release] += num_rows

    def end(self, release: str, num_rows: int = 1) -> None:
        """Count rows that ended, or were refused."""
        with self._lock:
            self._counts[release] -= num_rows
            assert self._counts[release] >= 0, f"{release}: more rows ended than began"

    def counts(self) -> dict[str, int]:
        """Return the open rows of every release met so far."""
        with self._lock:
            return dict(self._counts)
