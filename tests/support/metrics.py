"""Reading a server's Prometheus metrics and its memory."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.servers import RunningServer


def read_gauge(server: RunningServer, name: str, kind: str) -> float | None:
    """Return the series of *name* with *kind* among its labels; None while there is none."""
    url = f"http://127.0.0.1:{server.state.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    match = re.search(rf'^{name}{{[^}}]*="{kind}"[^}}]*}} ([\d.e+-]+)$', text, re.MULTILINE)
    return None if match is None else float(match[1])


def wait_for_gauge(server: RunningServer, name: str, kind: str, value: float, timeout_s: float = 30.0) -> None:
    """Wait until a gauge has a value."""
    deadline_s = time.monotonic() + timeout_s
    while (found := read_gauge(server, name, kind)) != value:
        assert time.monotonic() < deadline_s, f"{name} {kind} is {found}, not {value}"
        time.sleep(0.05)


def resident_kib(leader: int) -> int:
    """Return the resident memory of a process group."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == leader:
            total += int(fields[21]) * 4
    return total
