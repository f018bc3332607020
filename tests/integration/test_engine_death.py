"""An engine killed under load: its streams fail in time with a clear error, the door stays up, a reload heals it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc
from tests.support.servers import RunningServer, running_server

from enginehouse_client import Client
from enginehouse_contract.errors import EnginehouseError, EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.model]


@pytest.fixture
def mortal_server(smollm2_build: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server of its own, since its engine will be killed."""
    with running_server(smollm2_build, tmp_path) as server:
        yield server


def engine_pid(server: RunningServer) -> int:
    """Return the process id of the engine model's stub."""
    marker = str(server.settings.cache_dir).encode()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = cmdline.read_bytes()
        except OSError:
            continue
        if b"triton_python_backend_stub" in text and marker in text and b"/tensorrtllm/" in text:
            return int(cmdline.parent.name)
        if b"triton_python_backend_stub" in text and marker in text and b"/tensorrt_llm/" in text:
            return int(cmdline.parent.name)
    raise AssertionError("no engine stub runs")


def test_streams_of_a_dead_engine_fail_and_a_reload_brings_it_back(mortal_server: RunningServer) -> None:
    """Running streams end with an error that says the engine died, new requests too, until the engine is reloaded."""
    server = mortal_server
    errors: list[EnginehouseError] = []
    started = threading.Semaphore(0)

    def stream() -> None:
        with Client(server.grpc_url, max_retries=0) as client:
            try:
                for _ in client.generate_stream("Count: one, two,", max_tokens=4000, extra_inputs={"end_id": -1}):
                    started.release()
            except EnginehouseError as error:
                errors.append(error)

    threads = [threading.Thread(target=stream) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        assert started.acquire(timeout=60)
    os.kill(engine_pid(server), signal.SIGKILL)
    killed_s = time.monotonic()
    for thread in threads:
        thread.join(30)

    assert len(errors) == 3
    assert time.monotonic() - killed_s < 20
    assert all(isinstance(error, EngineUnavailableError) for error in errors), errors
    with Client(server.grpc_url, max_retries=0) as client:
        assert client.model_ready("tensorrt_llm_bls")
        with pytest.raises(EngineUnavailableError):
            client.generate("hello", max_tokens=4)
        with pytest.raises(EngineUnavailableError):
            client.probe()
        with tritonclient.grpc.InferenceServerClient(server.grpc_url) as admin:
            admin.unload_model("tensorrt_llm")
            deadline_s = time.monotonic() + 60
            while admin.is_model_ready("tensorrt_llm"):
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            admin.load_model("tensorrt_llm")
        assert client.probe() == server.state.build_id
        answer = client.generate("The capital of France is", max_tokens=4)

    assert answer.text.startswith(" Paris")
