"""Finding and killing the processes of a running server."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.servers import RunningServer


def stub_pids(server: RunningServer, model: str) -> list[int]:
    """Return the process ids of a model's Python stubs, one for each instance."""
    home, own = str(server.settings.home).encode(), f"/{model}/".encode()
    backend = b"/tensorrtllm/" if model == "tensorrt_llm" else own
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = cmdline.read_bytes()
        except OSError:
            continue
        if b"triton_python_backend_stub" in text and home in text and (own in text or backend in text):
            found.append(int(cmdline.parent.name))
    return found


def kill_stubs(server: RunningServer, model: str) -> None:
    """Kill a model's stubs without a word."""
    pids = stub_pids(server, model)
    assert pids, f"no stub of {model} runs"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_server(server: RunningServer) -> None:
    """Kill tritonserver and its stubs without a word."""
    os.killpg(server.state.pid, signal.SIGKILL)
