"""The state file: whose server runs on this folder, if any."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from enginehouse_backends.server.supervisor import STATE_FILE, ServerState, read_state, refuse_second_server
from enginehouse_contract.errors import ServerStartError


def record(home: Path, pid: int) -> ServerState:
    """Write a state file."""
    state = ServerState(pid, 1, 2, 3, "sha256:b", "log")
    (home / STATE_FILE).write_text(json.dumps(asdict(state)))
    return state


def start(home: Path, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a system program under the name tritonserver."""
    found = shutil.which(program)
    assert found is not None
    binary = home / "tritonserver"
    shutil.copy(found, binary)
    return subprocess.Popen([str(binary), *arguments])  # noqa: S603 - a copy of a system program


def test_a_running_server_is_found_and_not_joined(tmp_path: Path) -> None:
    """Its state is returned, and a second one is refused with its process and port."""
    process = start(tmp_path, "sleep", "60")
    try:
        state = record(tmp_path, process.pid)
        deadline_s = time.monotonic() + 20
        while read_state(tmp_path) is None and time.monotonic() < deadline_s:  # until it has become the program
            time.sleep(0.01)

        assert read_state(tmp_path) == state
        with pytest.raises(ServerStartError, match=f"pid {process.pid}, gRPC port 1"):
            refuse_second_server(tmp_path)
    finally:
        process.kill()
        process.wait()

    assert read_state(tmp_path) is None


def test_a_dead_server_that_nobody_waited_for_does_not_count(tmp_path: Path) -> None:
    """In a container whose first process reaps nobody, a dead server stays in the process table for ever."""
    process = start(tmp_path, "true")
    record(tmp_path, process.pid)
    deadline_s = time.monotonic() + 20
    while ") Z " not in Path(f"/proc/{process.pid}/stat").read_text() and time.monotonic() < deadline_s:
        time.sleep(0.01)

    assert read_state(tmp_path) is None
    process.wait()


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json"])
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    """Nothing runs as far as anybody can tell; no error."""
    (tmp_path / STATE_FILE).write_text(text)

    assert read_state(tmp_path) is None
