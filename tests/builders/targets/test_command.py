"""`enginehouse build` for GPU targets, as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from enginehouse_builders.gates.compatibility import compatibility_gate, needs_of, read_config
from enginehouse_builders.gates.host import Gpu, Host
from enginehouse_contract.manifest import verify_build

if TYPE_CHECKING:
    from tests.builders.targets.conftest import Models

    from enginehouse_contract.manifest import Target

TARGETS: tuple[Target, ...] = ("tensorrt_llm", "tensorrt_llm_pytorch")


def enginehouse(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-c", "from enginehouse_cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)  # noqa: S603 - our own


@pytest.fixture
def spec_file(models: Models, tmp_path: Path) -> Path:
    """A spec for both GPU targets, its model beside it by a relative path."""
    models.hugging_face()
    path = tmp_path / "tiny.yaml"
    spec = {
        "spec_version": 1,
        "name": "tiny",
        "model": {"source": "models/model"},
        "targets": list(TARGETS),
        "limits": {"max_seq_len": 512},
    }
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return path


@pytest.mark.parametrize("target", TARGETS)
def test_emit_writes_the_script_anywhere(spec_file: Path, tmp_path: Path, target: str) -> None:
    """`--emit` needs no GPU and says where the script is and how the container runs it."""
    out = tmp_path / "out"
    done = enginehouse("build", str(spec_file), "--target", target, "--emit", str(out), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert Path(said["script"]) == out / "build_engine.py"
    assert said["container_image"] in said["container_command"]
    assert (out / "build_engine.py").is_file()


def test_a_build_without_gpus_is_refused_in_words(spec_file: Path) -> None:
    """On a host without TensorRT-LLM the command fails with what is missing and where the script is; no traceback."""
    done = enginehouse("build", str(spec_file), "--target", "tensorrt_llm")
    assert done.returncode != 0
    words = " ".join((done.stdout + done.stderr).split())
    for part in ("not installed here", "NVIDIA GPU", "build_engine.py", "docker run"):
        assert part in words, words
    assert "Traceback" not in words


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("target", TARGETS)
def test_a_build_goes_into_the_store_and_passes_the_compatibility_gate(spec_file: Path, target: Target) -> None:
    """Where TensorRT-LLM and GPUs are, a build is stored; the gate reads its SM, its version and its ranks."""
    done = enginehouse("build", str(spec_file), "--target", target, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    folder = Path(json.loads(done.stdout)["path"])
    manifest = verify_build(folder)
    needs = needs_of(manifest, read_config(folder))
    assert (needs.target, needs.sm, needs.world_size) == (target, 90, 1)

    def host(sm: int) -> Host:
        versions = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}
        return Host("cpu", 16, 1 << 37, (Gpu("GPU", sm, "580.95.05", 80 << 30),), versions)

    assert compatibility_gate(needs, host(90)).status == "passed"
    other = compatibility_gate(needs, host(80))
    assert other.status != "passed"
    assert "SM 90" in other.reason
