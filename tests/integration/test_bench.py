"""`enginehouse bench` against a real server: counts, builds and money are the server's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from enginehouse_cli.main import run
from enginehouse_contract.manifest import read_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import RunningServer

pytestmark = [pytest.mark.integration, pytest.mark.model]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_run_counts_what_the_server_counts(
    server: RunningServer, smollm2_build: Path, tmp_path: Path, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers have the asked length, prompts about theirs, the shared prefix is cached, and the build is named."""
    url = server.grpc_url if protocol == "grpc" else server.http_url
    seed = {"grpc": "11", "http": "12"}[protocol]
    load = ("--num-requests", "8", "--warmup", "1", "--concurrency", "2", "--seed", seed)
    lengths = ("--input-tokens", "100", "--output-tokens", "12", "--shared-prefix", "80")
    result = tmp_path / "run.json"

    code = run(["bench", "--url", url, *load, *lengths, "--output", str(result), "--json"])
    figures = json.loads(capsys.readouterr().out)["figures"]

    assert code == 0
    assert (figures["num_complete"], figures["num_failed"]) == (8, 0)
    assert (figures["output_tokens"]["min"], figures["output_tokens"]["max"]) == (12, 12)
    assert figures["input_tokens"]["mean"] == pytest.approx(100, rel=0.1)
    assert figures["cached_input_share"] > 0.4
    assert figures["build_ids"] == {read_manifest(smollm2_build).build_id: 8}
    assert figures["finish_reasons"] == {"length": 8}
    assert len(json.loads(result.read_text())["requests"]) == 9


def test_cancelled_requests_leave_the_server_well(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of an open loop's requests are cancelled on the way; the others get their whole answers."""
    load = ("--rate", "6", "--num-requests", "12", "--warmup", "0", "--cancel-share", "0.5", "--output-tokens", "24")

    code = run(["bench", "--url", server.grpc_url, *load, "--input-tokens", "16", "--json"])
    figures = json.loads(capsys.readouterr().out)["figures"]

    assert code == 0
    assert figures["num_failed"] == 0
    assert 0 < figures["num_cancelled"] < 12
    assert figures["num_complete"] == 12 - figures["num_cancelled"]
    assert figures["output_tokens"]["min"] == 24
