"""The `enginehouse` command on a home of its own: served, promoted, and killed where a test says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse_backends.server.supervisor import read_state
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from enginehouse_backends.server.supervisor import ServerState

_COMMAND = str(Path(sys.executable).with_name("enginehouse"))
_PARAMETERS = ("--parameter", "kv_cache_memory_budget_bytes=200000000", "--parameter", "stats_check_period_ms=50")
_KILLED_AFTER = """
import os, signal, sys
from enginehouse_builders.promotion import book, promoter
from enginehouse_cli.main import run

words = sys.argv[1]
report = promoter.Promoter.__init__

def init(self, *arguments, **options):
    say = options["report"]
    def die(text):
        say(text)
        if text.startswith(words):
            os.kill(os.getpid(), signal.SIGKILL)
    report(self, *arguments, **{**options, "report": die})

promoter.Promoter.__init__ = init
sys.exit(run(sys.argv[2:]))
"""


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def row(self) -> Any:
        """Its JSON."""
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class House:
    """One home with its running server."""

    settings: Settings

    @property
    def state(self) -> ServerState:
        """The server that runs."""
        state = read_state(self.settings.home)
        assert state is not None
        return state

    def run(self, *arguments: str) -> Done:
        """Run a command to its end."""
        return _finished(self.start(*arguments))

    def run_killed(self, after: str, *arguments: str) -> Done:
        """Run a command that is killed right after it reports a step."""
        return _finished(_start(self.settings, [sys.executable, "-c", _KILLED_AFTER, after, *arguments]))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        return _start(self.settings, [_COMMAND, *arguments])


@contextmanager
def served_house(home: Path, build: Path | None) -> Iterator[House]:
    """Run `enginehouse serve` on a build, or on what is in production, until the end of the block."""
    settings = Settings(home=home)
    ports = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0")
    wanted = () if build is None else (str(build), *_PARAMETERS)
    process = _start(settings, [_COMMAND, "serve", *wanted, *ports])
    try:
        deadline_s = time.monotonic() + 120
        while read_state(home) is None:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        yield House(settings)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _start(settings: Settings, command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, **settings.environ()}
    return subprocess.Popen(  # noqa: S603 - our own command
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finished(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=200)
    return Done(process.returncode, out, err)
