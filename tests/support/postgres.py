"""A PostgreSQL server of the tests' own: in a temporary folder, on a Unix socket, as an unprivileged user."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNPRIVILEGED_USERS = ("postgres", "nobody")
_MAX_STARTS = 50


def find_postgres() -> Path | None:
    """Return the folder of PostgreSQL's server programs, None where it is not installed."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    candidates = [*([Path(on_path).resolve().parent] if on_path else []), *folders]
    return next(
        (folder for folder in candidates if (folder / "initdb").exists() and (folder / "postgres").exists()), None
    )


@dataclass
class PostgresServer:
    """A running server; :meth:`kill` is kill -9 of all of it, :meth:`start` brings it back with its data."""

    programs: Path
    folder: Path
    user: str | None
    process: subprocess.Popen[bytes] | None = None

    def url(self, database: str) -> str:
        """Return the URL of a database of this server."""
        return f"postgresql://tests@/{database}?host={self.folder}"

    def initialize(self) -> None:
        """Create the cluster."""
        options = ["--username=tests", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        self._run("initdb", f"--pgdata={self.folder / 'data'}", *options)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        for _ in range(_MAX_STARTS):
            self._launch()
            while self.process is not None and self.process.poll() is None:
                if self._runs("pg_isready", "--quiet", f"--host={self.folder}", "--username=tests"):
                    return
                time.sleep(0.1)
            time.sleep(0.2)  # children of a killed server may still be there; it starts once they are gone
        raise RuntimeError("PostgreSQL did not start")

    def _launch(self) -> None:
        options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}", "-c", "fsync=off"]
        self.process = subprocess.Popen(  # noqa: S603 - the arguments are ours
            [self.programs / "postgres", "-D", self.folder / "data", *options],
            user=self.user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        self._run("createdb", f"--host={self.folder}", "--username=tests", name)
        return self.url(name)

    def kill(self) -> None:
        """Kill the server without warning."""
        assert self.process is not None, "the server was started"
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        """Shut the server down."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()

    def _runs(self, program: str, *arguments: str) -> bool:
        return self._run_program(program, *arguments).returncode == 0

    def _run(self, program: str, *arguments: str) -> None:
        done = self._run_program(program, *arguments)
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr.decode()}")

    def _run_program(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(  # noqa: S603 - the arguments are ours
            [self.programs / program, *arguments], user=self.user, capture_output=True, check=False
        )


def run_postgres(programs: Path) -> Iterator[PostgresServer]:
    """Run a server until the generator is closed."""
    user = None
    if os.geteuid() == 0:
        names = {entry.pw_name for entry in pwd.getpwall()}
        user = next(name for name in _UNPRIVILEGED_USERS if name in names)
    with tempfile.TemporaryDirectory(prefix="enginehouse-postgres-") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(programs, folder, user)
        server.initialize()
        server.start()
        try:
            yield server
        finally:
            server.stop()
