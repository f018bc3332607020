"""Three tenants on one server, one of which asks ten times as much: everyone gets a share, nobody starves."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.support.servers import running_server

from enginehouse_client import Client

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.slow]

NUM_STREAMS = {"greedy": 20, "modest": 2, "quiet": 2}
LIMITS = {"max_active_requests": "3", "max_queue_size": "64"}
NUM_TOKENS = 12
RUN_S = 12.0


def test_a_tenant_that_asks_ten_times_as_much_does_not_get_ten_times_as_much(
    smollm2_build: Path, tmp_path: Path
) -> None:
    """First come, first served would give the greedy one ten tokens for one of the others'; a fair queue does not."""
    served: Counter[str] = Counter()
    lock = threading.Lock()
    with running_server(smollm2_build, tmp_path, LIMITS) as server:
        ends_s = time.monotonic() + RUN_S

        def stream(tenant: str, number: int) -> None:
            with Client(server.grpc_url) as client:
                while time.monotonic() < ends_s:
                    prompt = f"{tenant} {number}: tell me a story about the number {number}."
                    answer = client.generate(prompt, max_tokens=NUM_TOKENS, tenant=tenant, extra_inputs={"end_id": -1})
                    with lock:
                        served[tenant] += answer.usage.num_output_tokens or 0

        threads = [
            threading.Thread(target=stream, args=(tenant, number))
            for tenant, count in NUM_STREAMS.items()
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert set(served) == set(NUM_STREAMS)
    for tenant in ("modest", "quiet"):
        assert served[tenant] > 0.5 * served["greedy"], served
