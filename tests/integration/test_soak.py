"""A soak of the front door: thousands of responses, random cancels, killed clients and errors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.metrics import resident_kib, wait_for_gauge
from tests.support.servers import RunningServer, instant_server

from enginehouse_client import Client
from enginehouse_contract.errors import EnginehouseError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.slow]

NUM_RESPONSES = int(os.environ.get("SOAK_RESPONSES", "6000"))
NUM_CLIENTS = 12


class Soak:
    """Clients that stream, leave, fail and are killed, until enough responses were seen."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.num_responses = 0
        self.num_cancelled = 0
        self.num_refused = 0
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run all clients to the end."""
        threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._killed_client()
        for thread in threads:
            thread.join()

    def _client(self, seed: int) -> None:
        rng = random.Random(seed)
        address = self.server.grpc_url if seed % 2 else self.server.http_url
        with Client(address, max_retries=0) as client:
            while self.num_responses < NUM_RESPONSES and not self.problems:
                try:
                    self._request(client, rng)
                except EnginehouseError as error:
                    self.problems.append(f"{type(error).__name__}: {error}")

    def _request(self, client: Client, rng: random.Random) -> None:
        options: dict[str, Any] = {"max_tokens": rng.randrange(1, 400), "extra_inputs": {"end_id": -1}}
        kind = rng.random()
        if kind < 0.05:
            with pytest.raises(EnginehouseError):
                client.generate("x", top_p=3.0, **options)
            with self._lock:
                self.num_refused += 1
            return
        leave_after = rng.randrange(1, 6) if kind < 0.35 else None
        chunks = client.generate_stream(f"prompt {rng.random()}", timeout_s=60, **options)
        count, num_tokens = 0, None
        for chunk in chunks:
            count += 1
            num_tokens = chunk.usage.num_output_tokens
            if count == leave_after:
                break
        chunks.close()
        with self._lock:
            self.num_responses += count
            self.num_cancelled += leave_after is not None
        if leave_after is None and num_tokens != options["max_tokens"]:
            self.problems.append(f"asked for {options['max_tokens']} tokens, got {num_tokens}")

    def _killed_client(self) -> None:
        script = (
            "from enginehouse_client import Client\n"
            f"for c in Client({self.server.grpc_url!r}).generate_stream('killed', max_tokens=4000, "
            "extra_inputs={'end_id': -1}): print('x', flush=True)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)  # noqa: S603 - our script
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_soak_of_cancels_kills_and_errors_leaves_the_server_well(
    smollm2_build: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Server and stubs live, nothing hangs, every whole answer is whole, and memory is flat after the first third."""
    limits = {"max_active_requests": "16", "max_queue_size": "64"}
    with instant_server(smollm2_build, tmp_path_factory.mktemp("soak"), limits) as server:
        warm = Soak(server)
        warm.num_responses = NUM_RESPONSES * 2 // 3
        warm.run()
        before_kib = resident_kib(server.state.pid)
        soak = Soak(server)
        soak.run()
        grown_kib = resident_kib(server.state.pid) - before_kib
        wait_for_gauge(server, "nv_trt_llm_request_metrics", "active", 0)
        with Client(server.grpc_url) as client:
            answer = client.generate("still there?", max_tokens=5, extra_inputs={"end_id": -1})

    assert warm.problems == soak.problems == []
    assert soak.num_responses >= NUM_RESPONSES
    assert soak.num_cancelled > 0
    assert soak.num_refused > 0
    assert answer.usage.num_output_tokens == 5
    assert grown_kib < 150_000
