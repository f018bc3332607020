"""Clients that leave, in every way they can: the engine stops computing for them and frees their blocks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.metrics import read_gauge, wait_for_gauge

from enginehouse_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import RunningServer

pytestmark = [pytest.mark.integration, pytest.mark.model]

LONG = {"max_tokens": 4000, "seed": 1, "top_k": 50, "temperature": 1.5}
PROMPT = "Count from one to ten thousand: one, two, three,"


@pytest.fixture(autouse=True)
def idle_server(server: RunningServer) -> Iterator[None]:
    """Each test begins and ends with an idle engine whose blocks are all free."""
    wait_until_idle(server)
    yield
    wait_until_idle(server)


def wait_until_idle(server: RunningServer) -> None:
    """Wait until no sequence is active and no block is used."""
    wait_for_gauge(server, "nv_trt_llm_request_metrics", "active", 0)
    wait_for_gauge(server, "nv_trt_llm_kv_cache_block_metrics", "used", 0)


def wait_until_busy(server: RunningServer) -> None:
    """Wait until a sequence is active."""
    wait_for_gauge(server, "nv_trt_llm_request_metrics", "active", 1)


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_closing_a_stream_stops_the_engine(server: RunningServer, way: str) -> None:
    """A stream that is closed after a few pieces ends its generation on the server."""
    with Client(server.grpc_url if way == "grpc" else server.http_url) as client:
        chunks = client.generate_stream(PROMPT, **LONG)
        next(chunks)
        wait_until_busy(server)
        chunks.close()
        wait_until_idle(server)
        answer = client.generate("The capital of France is", max_tokens=4)

    assert answer.text.startswith(" Paris")


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_a_killed_client_stops_the_engine(server: RunningServer, way: str) -> None:
    """A client process killed in the middle of a stream leaves nothing running on the server."""
    address = server.grpc_url if way == "grpc" else server.http_url
    script = (
        "from enginehouse_client import Client\n"
        f"for chunk in Client({address!r}).generate_stream({PROMPT!r}, **{LONG!r}):\n"
        "    print('x', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)  # noqa: S603 - our own script
    assert process.stdout is not None
    assert process.stdout.readline() == b"x\n"
    wait_until_busy(server)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until_idle(server)

    assert read_gauge(server, "nv_trt_llm_request_metrics", "active") == 0


def test_interrupting_the_command_cancels_on_the_server(server: RunningServer) -> None:
    """Ctrl-C during `enginehouse generate --stream` exits with 130 and stops the engine."""
    command = [sys.executable, "-c", "from enginehouse_cli.main import main; main()", "generate", PROMPT, "--stream"]
    command += ["--max-tokens", "4000", "--url", server.grpc_url, "--top-k", "50", "--temperature", "1.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603 - our own command
    assert process.stdout is not None
    assert process.stdout.read(1)
    wait_until_busy(server)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == 130
    assert b"Traceback" not in errors
    wait_until_idle(server)


def test_a_deadline_ends_with_the_text_so_far(server: RunningServer) -> None:
    """`timeout_ms` ends a long answer with reason `timeout`, keeping what came, and stops the engine."""
    with Client(server.grpc_url) as client:
        started_s = time.monotonic()
        result = client.generate(PROMPT, timeout_ms=1500, **LONG)

    assert result.finish_reason == "timeout"
    assert result.text
    assert time.monotonic() - started_s < 60
    wait_until_idle(server)
