"""Failures in the steps of a build, the script that reproduces them, provenance, and builders that wait."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_models import TinyModel

from enginehouse_builders.cpu import model_files
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.cpu.options import options_of
from enginehouse_builders.provenance import check_provenance, read_provenance
from enginehouse_builders.spec.loading import load_spec
from enginehouse_builders.spec.model import Spec
from enginehouse_builders.store import list_builds
from enginehouse_contract.errors import BuildError, BuildIntegrityError, ModelSourceError
from enginehouse_contract.manifest import verify_build

MODEL = TinyModel(num_layers=2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny GGUF file."""
    return MODEL.write_gguf(tmp_path / "tiny.gguf", "Q4_1", general__basename="tiny")


def work_folder(store: Path) -> Path:
    """The folder of the build that failed."""
    (folder,) = store.glob(".building-*")
    return folder


@pytest.mark.slow
def test_the_script_of_a_failed_build_fails_the_same_way(tmp_path: Path) -> None:
    """A model that lacks a tensor fails in `convert`, and the script, in a process of its own, says the same."""
    folder = TinyModel(num_layers=2).write_folder(tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")
    store = tmp_path / "store"
    with pytest.raises(ModelSourceError, match=r"The step `convert` failed; its log is .*`sh .*reproduce\.sh` fails"):
        build_engine(BuildOptions(model=folder), store)
    script = work_folder(store) / "reproduce.sh"
    statuses = {row["step"]: row["outcome"] for row in json.loads((script.parent / "steps.json").read_text("utf-8"))}
    assert statuses == {"plan": "done", "fetch": "done", "convert": "failed"}
    assert "convert: failed:" in (script.parent / "build.log").read_text(encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if name != "ENGINEHOUSE_HOME"}
    done = subprocess.run(["/bin/sh", script], capture_output=True, text=True, check=False, cwd="/", env=environ)  # noqa: S603 - the script under test
    assert done.returncode == 1
    assert "model.layers.2" in done.stderr
    assert "The step `convert` failed" in done.stderr
    assert list_builds(store) == []


def test_no_space_anywhere_is_said(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for every file still gives one sentence that says so."""

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = tmp_path / "store"
    store.mkdir()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BuildError, match=r"cannot be written to .*store \(No space left on device\); free some space"):
        build_engine(BuildOptions(model=model), store)
    monkeypatch.undo()
    assert not build_engine(BuildOptions(model=model), store).cached


def test_a_second_builder_waits_and_finds_the_build(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one builds, another of the same waits; it makes nothing, and gets the hit."""
    store, at_work, waits = tmp_path / "store", threading.Event(), threading.Event()
    write_model, num_written = model_files.write_model, []

    def slow_write(*arguments: Any) -> int:
        num_written.append(1)
        at_work.set()
        assert waits.wait(60)
        return write_model(*arguments)

    monkeypatch.setattr(model_files, "write_model", slow_write)
    results = []
    first = threading.Thread(target=lambda: results.append(build_engine(BuildOptions(model=model), store)))
    first.start()
    assert at_work.wait(60)
    second = build_engine(
        BuildOptions(model=model), store, lambda step, _share: waits.set() if step.startswith("waiting") else None
    )
    first.join()
    assert second.cached
    assert not results[0].cached
    assert len(num_written) == 1
    assert second.build_dir == results[0].build_dir


def test_provenance_states_what_the_id_is_made_of(model: Path, tmp_path: Path) -> None:
    """An in-toto statement: its subjects are the files, its inputs give the id, and it names the model's digest."""
    result = build_engine(BuildOptions(model=model, weight_precision="int8"), tmp_path / "store")
    found = read_provenance(result.build_dir)
    assert found is not None
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://slsa.dev/provenance/v1"
    assert check_provenance(result.build_dir, result.manifest)
    (dependency,) = found["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert dependency == {"name": "tiny.gguf", "digest": {"sha256": result.manifest.source["sha256"]}}
    assert str(tmp_path) not in json.dumps(found)


@pytest.mark.parametrize("part", ["inputs", "subject"])
def test_provenance_that_does_not_fit_is_refused(part: str, model: Path, tmp_path: Path) -> None:
    """Other inputs give another id; other subjects are not what was built."""
    result = build_engine(BuildOptions(model=model), tmp_path / "store")
    path = result.build_dir / "provenance.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    if part == "inputs":
        found["predicate"]["buildDefinition"]["internalParameters"]["inputs"]["weight_precision"] = "int8"
    else:
        found["subject"][0]["digest"]["sha256"] = "0" * 64
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(BuildIntegrityError, match=r"give the id|is not what provenance\.json says"):
        check_provenance(result.build_dir, result.manifest)


def test_a_spec_and_a_plain_model_share_a_build(model: Path, tmp_path: Path) -> None:
    """A plain model is a spec of defaults; the spec that lies in a build asks for that build again."""
    spec_file = tmp_path / "spec.yaml"
    spec_file.write_text("name: tiny\nmodel: {source: tiny.gguf}\n", encoding="utf-8")
    first = build_engine(options_of(load_spec(spec_file)), tmp_path / "store")
    assert build_engine(BuildOptions(model=model), tmp_path / "store").cached
    resolved = json.loads((first.build_dir / "spec.json").read_text(encoding="utf-8"))
    assert Spec.model_validate(resolved).limits.max_seq_len == 256
    assert resolved["model"] == {"source": "tiny.gguf", "format": "auto", "sha256": first.manifest.source["sha256"]}
    (tmp_path / "again.yaml").write_text(json.dumps(resolved), encoding="utf-8")
    assert build_engine(options_of(load_spec(tmp_path / "again.yaml")), tmp_path / "store").cached


def test_two_hosts_give_one_id_and_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """The same spec over the same file, elsewhere and at another time, gives every file again, provenance included."""
    other = tmp_path / "elsewhere" / "tiny.gguf"
    other.parent.mkdir()
    shutil.copyfile(model, other)
    first = build_engine(BuildOptions(model=model, weight_precision="int4", group_size=16), tmp_path / "a")
    second = build_engine(BuildOptions(model=other, weight_precision="int4", group_size=16), tmp_path / "b")
    assert first.manifest.build_id == second.manifest.build_id
    assert first.manifest.files == second.manifest.files


def test_group_sizes_are_builds_of_their_own(model: Path, tmp_path: Path) -> None:
    """Smaller groups have more scales; the default stated is the default."""
    sizes = {}
    for group_size in (None, 32, 16):
        options = BuildOptions(model=model, weight_precision="int4", group_size=group_size)
        result = build_engine(options, tmp_path / "store")
        sizes[group_size] = result.manifest.files["openvino_model.bin"].num_bytes
        config = json.loads((result.build_dir / "config.json").read_text(encoding="utf-8"))
        assert config["pretrained_config"]["quantization"]["group_size"] == (group_size or 32)
    assert len(list_builds(tmp_path / "store")) == 2
    assert sizes[16] > sizes[32] == sizes[None]


def test_a_model_of_another_digest_is_refused(model: Path, tmp_path: Path) -> None:
    """A spec that names a digest builds from nothing else."""
    with pytest.raises(ModelSourceError, match=r"`model\.sha256` is not the digest of the model; given 0000"):
        build_engine(BuildOptions(model=model, source_sha256="0" * 64), tmp_path / "store")


def test_data_aware_weights_say_what_they_need(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWQ from a GGUF file is refused; without NNCF, from a folder, the extra to install is named."""
    with pytest.raises(ModelSourceError, match="needs the unquantized Hugging Face folder"):
        build_engine(BuildOptions(model=model, weight_precision="int4_awq"), tmp_path / "store")
    folder = MODEL.write_folder(tmp_path / "folder")
    monkeypatch.setattr("importlib.metadata.Distribution.from_name", _not_installed)
    with pytest.raises(BuildError, match=r"NNCF, which is not installed: pip install 'enginehouse\[export\]'"):
        build_engine(BuildOptions(model=folder, weight_precision="int4_gptq"), tmp_path / "store")


def _not_installed(name: str) -> Any:
    from importlib.metadata import PackageNotFoundError  # noqa: PLC0415 - only here

    raise PackageNotFoundError(name)


def test_a_build_that_ends_keeps_its_log(model: Path, tmp_path: Path) -> None:
    """Each step, its outcome and its seconds are in the log beside the store."""
    result = build_engine(BuildOptions(model=model), tmp_path / "home" / "store")
    text = (tmp_path / "home" / "logs" / "builds" / f"{result.build_dir.name}.log").read_text(encoding="utf-8")
    for line in ("plan: done", "fetch: done", "convert: done", "quantize: skipped", "compile: done", "record: done"):
        assert line in text
    assert "of weights" in text
    assert verify_build(result.build_dir)
