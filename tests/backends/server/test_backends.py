"""The backend directory that a server is started with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_backends.server.binary import TritonInstallation
from enginehouse_backends.server.repository import assemble_backends

if TYPE_CHECKING:
    from pathlib import Path


def installation(root: Path) -> TritonInstallation:
    """One with the files that are copied."""
    python = root / "backends" / "python"
    python.mkdir(parents=True)
    files = [python / name for name in ("libtriton_python.so", "triton_python_backend_utils.py", "stub")]
    for file in files:
        file.write_text(file.name)
    return TritonInstallation(root / "tritonserver", *files, library_dirs=(), origin="a test")


def test_without_nvidias_backend_ours_serves_the_engine_models(tmp_path: Path) -> None:
    """On a CPU host `tensorrtllm` is our Python-based backend."""
    assemble_backends(tmp_path / "made", installation(tmp_path), ["/somewhere"])

    engine_dir = tmp_path / "made" / "tensorrtllm"
    assert "TritonPythonModel" in (engine_dir / "model.py").read_text()
    assert "/somewhere" in (engine_dir / "enginehouse_backends.py").read_text()


def test_with_nvidias_backend_that_one_does_and_is_left_as_it_is(tmp_path: Path) -> None:
    """On a GPU host NVIDIA's folder is linked; assembling again, nothing of it is written or removed."""
    found = installation(tmp_path)
    nvidias = tmp_path / "backends" / "tensorrtllm"
    nvidias.mkdir()
    (nvidias / "libtriton_tensorrtllm.so").write_text("theirs")

    for _ in range(2):
        assemble_backends(tmp_path / "made", found, [])

    assert (tmp_path / "made" / "tensorrtllm").resolve() == nvidias
    assert [file.name for file in nvidias.iterdir()] == ["libtriton_tensorrtllm.so"]
    assert (tmp_path / "made" / "python" / "enginehouse_backends.py").is_file()
