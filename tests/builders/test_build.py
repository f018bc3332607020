"""Builds: their folder, their id, their limits, and what may go wrong while one is made."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import openvino as ov
import pytest
from tests.support.tiny_models import TinyModel

from enginehouse_builders import digests
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.store import list_builds
from enginehouse_contract.errors import BuildError, ConfigurationError, ModelSourceError
from enginehouse_contract.manifest import BuildLimits, verify_build

if TYPE_CHECKING:
    from pathlib import Path

MODEL = TinyModel(num_layers=2)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny GGUF file."""
    return MODEL.write_gguf(tmp_path / "tiny.gguf", "Q4_1", general__basename="tiny")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that is not there yet."""
    return tmp_path / "home" / "store"


def test_a_build_is_a_complete_engine_folder(model: Path, store: Path) -> None:
    """The folder has TensorRT-LLM's config, the graph, the tokenizer and a manifest that verifies."""
    stages: list[tuple[str, float]] = []
    result = build_engine(BuildOptions(model=model), store, lambda stage, share: stages.append((stage, share)))
    assert not result.cached
    assert verify_build(result.build_dir) == result.manifest
    assert {path.name for path in result.build_dir.iterdir()} == {
        "config.json",
        "manifest.json",
        "openvino_model.bin",
        "openvino_model.xml",
        "provenance.json",
        "spec.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((result.build_dir / "config.json").read_text(encoding="utf-8"))
    assert config["pretrained_config"]["architecture"] == "LlamaForCausalLM"
    assert config["pretrained_config"]["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": "INT8"}
    assert config["build_config"] == {
        "max_batch_size": 64,
        "max_input_len": 255,
        "max_seq_len": 256,
        "max_num_tokens": 512,
        "max_beam_width": 1,
        "kv_cache_type": "PAGED",
        "plugin_config": {"tokens_per_block": 32},
    }
    assert result.manifest.model_name == "tiny"
    assert result.manifest.source["kind"] == "gguf"
    shares = [share for _, share in stages]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("weight_precision", ["as_in_file", "int8", "int4", "f16", "f32"])
def test_the_same_input_gives_the_same_bytes(weight_precision: str, model: Path, tmp_path: Path) -> None:
    """Two stores get the same files, though names in the graph come from a counter of the process."""
    options = BuildOptions(model=model, weight_precision=weight_precision)
    first, second = (build_engine(options, tmp_path / name / "store").manifest for name in ("a", "b"))
    assert first.files == second.files
    assert dataclasses.replace(first, created_at="") == dataclasses.replace(second, created_at="")


def test_a_second_build_is_found_without_reading_the_model(
    model: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that is there is not made again, nor is the source's digest; stated defaults mean the same as none."""
    first = build_engine(BuildOptions(model=model), store)
    monkeypatch.setattr(digests, "sha256_of_file", lambda _path: pytest.fail("the model was read again"))
    again = build_engine(BuildOptions(model=model, max_seq_len=256, max_input_len=255, name="tiny"), store)
    assert again.cached
    assert again.build_dir == first.build_dir
    assert again.manifest == first.manifest


def test_a_changed_model_is_another_build(model: Path, store: Path) -> None:
    """Other weights in a file of the same name and size give another build id."""
    first = build_engine(BuildOptions(model=model), store)
    TinyModel(num_layers=2, seed=9).write_gguf(model, "Q4_1", general__basename="tiny")
    second = build_engine(BuildOptions(model=model), store)
    assert not second.cached
    assert second.manifest.build_id != first.manifest.build_id


@pytest.mark.parametrize(
    "change",
    [
        {"weight_precision": "int8"},
        {"kv_precision": "f16"},
        {"max_batch_size": 8},
        {"max_seq_len": 128},
        {"max_input_len": 100},
        {"max_num_tokens": 64},
        {"name": "other"},
    ],
)
def test_every_option_decides_the_id(change: dict[str, Any], model: Path, store: Path) -> None:
    """No two different options share a build."""
    plain = build_engine(BuildOptions(model=model), store)
    changed = build_engine(BuildOptions(model=model, **change), store)
    assert changed.manifest.build_id != plain.manifest.build_id
    assert len(list_builds(store)) == 2


def test_a_folder_and_a_file_of_one_model_give_one_graph(tmp_path: Path) -> None:
    """The same weights from safetensors and GGUF become the same constants."""
    folder = MODEL.write_folder(tmp_path / "folder")
    path = MODEL.write_gguf(tmp_path / "tiny.gguf", "F32")
    first, second = (
        build_engine(BuildOptions(model=model, weight_precision="f32"), tmp_path / "store") for model in (folder, path)
    )
    assert first.manifest.source["kind"] == "huggingface"
    assert first.manifest.files["openvino_model.bin"] == second.manifest.files["openvino_model.bin"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_precision": "int3"}, "`weight_precision`.*as_in_file, int8.*int3"),
        ({"kv_precision": "u4"}, "`kv_precision`.*u8, f16, f32.*u4"),
        ({"max_batch_size": 0}, "`max_batch_size`.*given 0"),
        ({"max_batch_size": -1}, "`max_batch_size`.*given -1"),
        ({"max_seq_len": -5}, "`max_seq_len`.*given -5"),
        ({"max_input_len": 0}, "`max_input_len`.*given 0"),
        ({"max_num_tokens": -64}, "`max_num_tokens`.*given -64"),
        ({"max_num_tokens": 8}, "`max_num_tokens`.*64.*given 8"),
        ({"max_seq_len": 257}, "`max_seq_len` is beyond the model's window; limit 256, given 257"),
        ({"max_seq_len": 64, "max_input_len": 64}, "`max_input_len`.*limit 63, given 64"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str, model: Path, store: Path) -> None:
    """A refusal names field, limit and value, and leaves no build."""
    with pytest.raises(ConfigurationError, match=message):
        build_engine(BuildOptions(model=model, **options), store)
    assert list_builds(store) == []


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, store: Path) -> None:
    """A path that does not exist is named, with what is wanted."""
    with pytest.raises(ModelSourceError, match=r"missing\.gguf does not exist"):
        build_engine(BuildOptions(model=tmp_path / "missing.gguf"), store)


class Interruption(Exception):  # noqa: N818 - stands for Ctrl-C
    """Raised in the middle of a build."""


def leftovers(store: Path) -> list[str]:
    """Folders in the store, hidden ones included."""
    return [path.name for path in store.iterdir() if path.is_dir()] if store.exists() else []


STEPS_ALL = ["plan", "fetch", "convert", "quantize", "compile", "record"]


@pytest.mark.parametrize("step", STEPS_ALL[1:])
def test_an_interrupted_build_goes_on_where_it_was(step: str, model: Path, store: Path) -> None:
    """Wherever a build is interrupted, no command sees it, and the next one does only what is left."""

    def interrupt(now: str, _share: float) -> None:
        if now == step:
            raise Interruption

    with pytest.raises(Interruption):
        build_engine(BuildOptions(model=model), store, interrupt)
    assert list_builds(store) == []
    assert [name[:10] for name in leftovers(store)] == [".building-"]
    seen: list[str] = []
    result = build_engine(BuildOptions(model=model), store, lambda now, _share: seen.append(now))
    done = STEPS_ALL[1 : STEPS_ALL.index(step)]
    assert not set(done) & set(seen)
    assert set(STEPS_ALL[STEPS_ALL.index(step) :]) <= set(seen)
    assert not result.cached
    assert leftovers(store) == [result.build_dir.name]


def build_in_child(model: Path, store: Path, kill_at: str | None) -> None:
    """Build, and die without any cleaning up when *kill_at* is reached."""

    def report(stage: str, _share: float) -> None:
        if stage == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    build_engine(BuildOptions(model=model), store, report)


def run_children(targets: list[tuple[Path, Path, str | None]]) -> list[int | None]:
    """Run builds in processes of their own at the same time; return their exit codes."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=build_in_child, args=arguments) for arguments in targets]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


@pytest.mark.slow
def test_a_build_killed_in_any_step_is_never_seen_and_resumes(model: Path, store: Path, tmp_path: Path) -> None:
    """A builder killed at the beginning of each step in turn ends with the bytes of an undisturbed one."""
    for step in STEPS_ALL[1:]:
        assert run_children([(model, store, step)]) == [-signal.SIGKILL]
        assert len(leftovers(store)) == 1
        assert list_builds(store) == []
    result = build_engine(BuildOptions(model=model), store)
    assert leftovers(store) == [result.build_dir.name]
    assert verify_build(result.build_dir) == result.manifest
    assert result.manifest.files == build_engine(BuildOptions(model=model), tmp_path / "other").manifest.files


def test_a_file_changed_between_two_tries_is_made_again(model: Path, store: Path) -> None:
    """What an earlier try left is used only while it has the digest that was recorded."""

    def interrupt(now: str, _share: float) -> None:
        if now == "record":
            raise Interruption

    with pytest.raises(Interruption):
        build_engine(BuildOptions(model=model), store, interrupt)
    weights = store / leftovers(store)[0] / "out" / "openvino_model.bin"
    damaged = bytearray(weights.read_bytes())
    damaged[100] ^= 1
    weights.write_bytes(damaged)
    seen: list[str] = []
    result = build_engine(BuildOptions(model=model), store, lambda now, _share: seen.append(now))
    assert "convert" in seen
    assert "fetch" not in seen
    assert verify_build(result.build_dir)


@pytest.mark.slow
def test_builders_of_one_build_do_not_disturb_each_other(model: Path, store: Path) -> None:
    """Of several builders at once all succeed, and one sound build is left."""
    assert run_children([(model, store, None)] * 3) == [0, 0, 0]
    assert len(leftovers(store)) == 1
    assert verify_build(list_builds(store)[0].build_dir)


class Loss(NamedTuple):
    """What happens to a file of a finished build."""

    name: str
    keeps: float | None  # share of the file; None: it is removed


@pytest.mark.parametrize(
    "loss", [Loss("openvino_model.bin", 0.5), Loss("tokenizer.json", None), Loss("manifest.json", 0)]
)
def test_a_damaged_build_is_made_again(loss: Loss, model: Path, store: Path) -> None:
    """A build that lost a file, or part of one, is replaced rather than found."""
    first = build_engine(BuildOptions(model=model), store)
    path = first.build_dir / loss.name
    if loss.keeps is None:
        path.unlink()
    else:
        os.truncate(path, int(path.stat().st_size * loss.keeps))
    second = build_engine(BuildOptions(model=model), store)
    assert not second.cached
    assert second.manifest.files == first.manifest.files
    assert verify_build(second.build_dir)
    assert leftovers(store) == [first.build_dir.name]


def test_a_full_disk_is_said_with_what_is_needed(model: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is refused before writing, with the space needed and free; nothing stays."""
    usage = shutil.disk_usage(model.parent)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(BuildError, match=r"\d+ MiB are needed in .*store, 1 MiB are free"):
        build_engine(BuildOptions(model=model), store)
    assert list_builds(store) == []


def test_a_disk_that_fills_while_writing_is_noticed(model: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's writer does not say that the disk is full: the short file is found before the build is published."""
    save_model = ov.save_model

    def save_half(written: ov.Model, path: Path, **options: Any) -> None:
        save_model(written, path, **options)
        weights = path.with_suffix(".bin")
        os.truncate(weights, weights.stat().st_size // 2)

    monkeypatch.setattr(ov, "save_model", save_half)
    with pytest.raises(BuildError, match=r"cannot be written.*The step `convert` failed; its log is .*build\.log"):
        build_engine(BuildOptions(model=model), store)
    assert list_builds(store) == []
    monkeypatch.undo()
    assert not build_engine(BuildOptions(model=model), store).cached


def test_a_store_that_cannot_be_written_is_said(model: Path, tmp_path: Path) -> None:
    """A store below a file is refused with the system's reason."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BuildError, match=r"cannot be written to .*store"):
        build_engine(BuildOptions(model=model), tmp_path / "file" / "store")


@pytest.mark.model
def test_smollm2_is_built_with_its_own_limits(smollm2_build: Path) -> None:
    """The demo's build verifies, and holds what the model's window and the defaults say."""
    manifest = verify_build(smollm2_build)
    assert manifest.limits == BuildLimits(64, 8191, 8192, 512)
    assert (manifest.weight_precision, manifest.kv_precision) == ("as_in_file", "u8")
