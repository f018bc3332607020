"""Two real servers changed in turn by the command, from a build in a remote store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.tiny_models import TinyModel

from enginehouse_backends.server.supervisor import read_state
from enginehouse_builders.cpu.build import BuildOptions, build_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = str(Path(sys.executable).with_name("enginehouse"))
SMALL = ["--parameter", "kv_cache_memory_budget_bytes=16777216", "--parameter", "num_threads=1"]


def enginehouse(home: Path, *arguments: str) -> tuple[int, Any, str]:
    """Run a command on a state folder: its status, its JSON and its errors."""
    environment = {**os.environ, "ENGINEHOUSE_HOME": str(home)}
    done = subprocess.run(  # noqa: S603 - our own command
        [COMMAND, *arguments, "--json"], capture_output=True, text=True, check=False, env=environment, timeout=240
    )
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny builds of random weights."""
    folder = tmp_path_factory.mktemp("builds")
    sources = [TinyModel(seed=seed).write_gguf(folder / f"tiny{seed}.gguf") for seed in (1, 2)]
    return [build_engine(BuildOptions(model=source), folder / "store").build_dir for source in sources]


@pytest.fixture
def homes(builds: list[Path], tmp_path: Path) -> Iterator[list[Path]]:
    """Two state folders, each with a server that serves the first build."""
    homes = [tmp_path / "a", tmp_path / "b"]
    servers = []
    try:
        for home in homes:
            home.mkdir()
            ports = ["--grpc-port", "0", "--http-port", "0", "--metrics-port", "0"]
            environment = {**os.environ, "ENGINEHOUSE_HOME": str(home)}
            servers.append(
                subprocess.Popen(  # noqa: S603 - our own command
                    [COMMAND, "serve", str(builds[0]), *ports, *SMALL],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        deadline_s = time.monotonic() + 120
        while not all(read_state(home) for home in homes):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        yield homes
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        for server in servers:
            server.wait(60)


def served(home: Path) -> str:
    """The build in production by the server's own account."""
    return str(enginehouse(home, "stage", "show", "production")[1]["production"]["build_id"])


def test_a_fleet_is_promoted_halted_resumed_and_rolled_back(
    homes: list[Path], builds: list[Path], tmp_path: Path
) -> None:
    """A build pushed once is pulled by both; a server that refuses halts it; the same command again goes on."""
    old, new = (json.loads((build / "manifest.json").read_text())["build_id"] for build in builds)
    store = f"file://{tmp_path}/remote"
    assert enginehouse(tmp_path / "ci", "builds", "push", str(builds[1]), store)[0] == 0
    servers = ["--server", str(homes[0]), "--server", str(homes[1])]
    url = f"{store}/{new}"

    # Without gates production refuses, on the first server already: nothing is changed anywhere.
    code, report, errors = enginehouse(tmp_path / "ci", "fleet", "promote", url, *servers)
    assert code == 1
    assert [host["outcome"] for host in report["hosts"]] == ["failed", "not tried"]
    assert "may not go to production" in errors
    assert [served(home) for home in homes] == [old, old]

    code, report, errors = enginehouse(tmp_path / "ci", "fleet", "promote", url, "--override", "a test", *servers)
    assert (code, [host["outcome"] for host in report["hosts"]]) == (0, ["changed", "changed"]), errors
    assert [served(home) for home in homes] == [new, new]

    code, report, _ = enginehouse(tmp_path / "ci", "fleet", "promote", url, "--override", "a test", *servers)
    assert (code, [host["outcome"] for host in report["hosts"]]) == (0, ["already", "already"])

    # One goes back by itself; taking the build out of the fleet leaves it alone.
    assert enginehouse(homes[0], "rollback")[0] == 0
    code, report, _ = enginehouse(tmp_path / "ci", "fleet", "rollback", new, "--why", "a test", *servers)
    assert (code, [host["outcome"] for host in report["hosts"]]) == (0, ["already", "changed"])
    assert [served(home) for home in homes] == [old, old]

    code, report, _ = enginehouse(tmp_path / "ci", "fleet", "status", *servers, "--server", "ssh://127.0.0.1:9/nowhere")
    assert code == 3
    assert [host["outcome"] for host in report["hosts"]] == ["already", "already", "unreachable"]
