"""Who holds a reservation: a process, named so that no later one is taken for it, even after a reboot."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

_START_TIME_FIELD: Final = 19  # of /proc/<pid>/stat, counted from after the command's name


def this_process() -> str:
    """Return this process's name: host, boot, process id, start time."""
    return "/".join((socket.gethostname(), _boot_id(), str(os.getpid()), _start_time(os.getpid()) or "unknown"))


def is_alive(owner: str) -> bool:
    """Whether the process of that name still runs. One of another host counts as alive: only its own host can tell."""
    host, boot_id, pid, start_time = owner.split("/")
    if host != socket.gethostname():
        return True
    return boot_id == _boot_id() and _start_time(int(pid)) == start_time


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _start_time(pid: int) -> str | None:
    """Ticks from boot to the start of a process; None when there is none, or it is dead and not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else fields[_START_TIME_FIELD]
