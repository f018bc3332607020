"""Gates over real builds on real servers: a quantized build passes, a broken one does not, the server stays well."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.broken_builds import scramble_scales

from enginehouse_backends.server.repository import render_repository
from enginehouse_backends.server.supervisor import ServerOptions, TritonServer
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.gates import describe_host, latest_record
from enginehouse_builders.gates.run import GateOptions, GateRun
from enginehouse_builders.gates.speed import Trace
from enginehouse_builders.spec.model import CostGate, Gates, SpeedGate
from enginehouse_builders.store import StoredBuild
from enginehouse_cli.gate_tools import PrivateServers, ShadowModels
from enginehouse_cli.main import run
from enginehouse_client import Client
from enginehouse_contract.manifest import MANIFEST_FILE, MODEL_FILE, FileRecord, read_manifest, sha256_of_file
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import RunningServer

    from enginehouse_builders.gates import GateRecord

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.slow]

# Speed is measured, not judged: other tests may run beside it.
OPTIONS = GateOptions(
    thresholds=Gates(
        speed=SpeedGate(min_throughput_ratio=0.01, max_ttft_ratio=100, max_itl_ratio=100), cost=CostGate(max_ratio=100)
    ),
    trace=Trace(num_requests=2, num_output_tokens=8, concurrency=2, num_pairs=1),
)


def _stored(folder: Path) -> StoredBuild:
    return StoredBuild(folder, read_manifest(folder))


@pytest.fixture(scope="module")
def int8_build(machine_settings: Settings, smollm2_gguf: Path) -> StoredBuild:
    """The same weights, 8 bits per channel."""
    result = build_engine(BuildOptions(model=smollm2_gguf, weight_precision="int8"), machine_settings.store_dir)
    return StoredBuild(result.build_dir, result.manifest)


def _status(record: GateRecord, gate: str) -> str:
    return next(result.status for result in record.results if result.gate == gate)


def _gate_models(url: str) -> list[str]:
    with Client(url) as client:
        return [model.name for model in client.models() if model.name.startswith("gate-") and model.is_ready]


def test_an_int8_build_passes_with_its_divergence_shown(
    int8_build: StoredBuild, smollm2_build: Path, tmp_path: Path
) -> None:
    """On two private servers, which leave nothing behind."""
    settings = Settings(home=tmp_path, accounting="off")
    record = GateRun(PrivateServers(settings), int8_build, _stored(smollm2_build), OPTIONS).run()
    numbers = record.results[4].numbers
    assert record.passed, record.why_not
    assert 0 < numbers["mean_kl_divergence"] < 0.05
    assert 0.9 < numbers["token_agreement"] <= 1
    assert numbers["num_answer_tokens"] >= 500
    assert list(settings.cache_dir.glob("enginehouse-gate-*")) == []


def test_a_broken_quantization_is_caught_on_a_running_server(
    int8_build: StoredBuild, smollm2_build: Path, server: RunningServer, tmp_path: Path
) -> None:
    """Scrambled scales load and answer, and fail the numeric gate; the server is left as it was."""
    broken = _stored(scramble_scales(int8_build.build_dir, tmp_path))
    before = sorted(server.settings.repository_dir.rglob("*"))
    record = GateRun(ShadowModels(server.grpc_url), broken, _stored(smollm2_build), OPTIONS).run()
    assert [_status(record, gate) for gate in ("load", "numeric", "speed")] == ["passed", "failed", "skipped"]
    assert "KL divergence" in record.why_not
    assert sorted(server.settings.repository_dir.rglob("*")) == before
    assert _gate_models(server.grpc_url) == []
    with Client(server.grpc_url) as client:
        assert client.generate("The capital of France is", max_tokens=4).text.startswith(" Paris")


def test_a_build_that_does_not_load_fails_in_the_servers_words(
    smollm2_build: Path, server: RunningServer, tmp_path: Path
) -> None:
    """A graph that is no model, with digests that are right: the load gate says what the runtime says."""
    folder = tmp_path / "unreadable"
    shutil.copytree(smollm2_build, folder)
    (folder / MODEL_FILE).write_text("<net/>")
    manifest = read_manifest(folder)
    record = FileRecord((folder / MODEL_FILE).stat().st_size, sha256_of_file(folder / MODEL_FILE))
    manifest = dataclasses.replace(manifest, files={**manifest.files, MODEL_FILE: record})
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    found = GateRun(ShadowModels(server.grpc_url), _stored(folder), None, OPTIONS).run()
    assert _status(found, "integrity") == "passed"
    assert _status(found, "load") == "failed"
    assert MODEL_FILE in found.why_not
    assert _gate_models(server.grpc_url) == []


def test_the_command_keeps_a_record_that_promotion_finds(
    smollm2_build: Path,
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 0, JSON with every gate, and the record under the home folder."""
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path))
    code = run(["gate", str(smollm2_build), "--url", server.grpc_url, "--json"])
    shown = json.loads(capsys.readouterr().out)
    kept = latest_record(tmp_path, read_manifest(smollm2_build).build_id, describe_host().kind)
    assert code == 0
    assert shown["passed"] is True
    assert kept is not None
    assert [result["gate"] for result in shown["results"]] == [result.gate for result in kept.results]


class _FixedServer(TritonServer):
    """A server that loads what its repository holds and takes no model from a client."""

    def _flags(self, *arguments: Any) -> list[str]:
        flags = super()._flags(*arguments)
        return [flag for flag in flags if not flag.startswith(("--load-model", "--model-control-mode"))]


def test_a_server_that_loads_nothing_on_request_is_no_place_for_gates(
    smollm2_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The advice is about the server; the build is not blamed."""
    settings = Settings(home=tmp_path / "server", accounting="off")
    render_repository(settings.repository_dir, smollm2_build)
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "gates-home"))
    with _FixedServer(settings, ServerOptions(settings.repository_dir)) as fixed:
        assert fixed.state is not None
        assert run(["gate", str(smollm2_build), "--url", fixed.state.grpc_url]) == 1
    assert "--model-control-mode=explicit" in capsys.readouterr().err
    assert not (tmp_path / "gates-home" / "gates").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["gate", "no-such-build"], 1, "no-such-build"),
        (["gate"], 2, "Missing argument"),
        (["gate", "BUILD", "--against", "no-such-build"], 1, "no-such-build"),
        (["gate", "BUILD", "--prompts", "none.jsonl"], 1, "none.jsonl cannot be read"),
        (["gate", "BUILD", "--spec", "none.yaml"], 1, "none.yaml cannot be read"),
        (["gate", "BUILD", "--url", "http://127.0.0.1:8000"], 1, "must be host:port"),
        (["gate", "BUILD", "--url", "nonsense"], 1, "must be host:port"),
        (["gate", "BUILD", "--url", "127.0.0.1:1"], 3, "127.0.0.1:1"),
    ],
)
def test_bad_arguments_get_one_line_and_an_exit_code(
    smollm2_build: Path,
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1 refused, 2 usage, 3 nobody answers; no record is kept of what says nothing about a build."""
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path))
    assert run([str(smollm2_build) if word == "BUILD" else word for word in arguments]) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error
    assert not (tmp_path / "gates").exists()
