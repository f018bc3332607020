"""What the targets read: model folders, calibration text, Medusa heads, this host."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.builders.targets.conftest import make_spec
from tests.support.strict_tensorrt_llm import StrictError, api, check_arguments

from enginehouse_builders.spec.model import SourceFormat
from enginehouse_builders.targets import host
from enginehouse_builders.targets.calibration import calibration_samples
from enginehouse_builders.targets.host import missing_on_this_host
from enginehouse_builders.targets.medusa import medusa_choices, read_medusa_heads
from enginehouse_builders.targets.source import read_source
from enginehouse_contract.errors import ConfigurationError, ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.builders.targets.conftest import Models

    from enginehouse_contract.manifest import Target


def test_a_folder_says_how_it_is_quantized(models: Models) -> None:
    """AutoAWQ, GPTQ, fp8 and ModelOpt folders are recognised by their JSON files alone."""
    for name, quantization, stored, by in (
        ("plain", None, None, ""),
        ("awq", {"quant_method": "awq", "group_size": 64}, "int4_awq", "autoawq"),
        ("gptq", {"quant_method": "gptq", "group_size": 32}, "int4_gptq", "gptq"),
        ("fp8", {"quant_method": "fp8"}, "fp8", "fp8"),
        ("modelopt", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", "modelopt"),
    ):
        config = {"quantization_config": quantization} if quantization else {}
        source = read_source(models.hugging_face(name, **config))
        assert (source.format, source.stored, source.stored_by) == (SourceFormat.HUGGING_FACE, stored, by)
        assert source.dtype == "bfloat16"
    folder = models.hugging_face("beside")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}', encoding="utf-8")
    assert read_source(folder).stored == "fp8"
    assert read_source(models.checkpoint(world_size=4)).tensor_parallel == 4


def test_a_model_that_cannot_be_read_is_refused(models: Models, tmp_path: Path) -> None:
    """No folder, no tokenizer, no architecture, an unknown quantization, broken JSON: each is said in one sentence."""
    with pytest.raises(ModelSourceError, match="is no folder"):
        read_source(tmp_path / "missing")
    no_tokenizer = models.hugging_face("no-tokenizer")
    (no_tokenizer / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match=r"no tokenizer\.json"):
        read_source(no_tokenizer)
    with pytest.raises(ModelSourceError, match="does not describe"):
        read_source(models.hugging_face("nameless", architectures=[]))
    with pytest.raises(ModelSourceError, match="given exl3"):
        read_source(models.hugging_face("exotic", quantization_config={"quant_method": "exl3"}))
    with pytest.raises(ModelSourceError, match="desc_act"):
        read_source(models.hugging_face("ordered", quantization_config={"quant_method": "gptq", "desc_act": True}))
    broken = models.hugging_face("broken")
    (broken / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelSourceError, match="cannot be read as JSON"):
        read_source(broken)


def test_weights_that_are_missing_or_truncated_are_found_before_hours_of_work(models: Models) -> None:
    """No weights, a shard that the index names and is not there, a file cut short: refused without reading weights."""
    bare = models.hugging_face("bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(ModelSourceError, match="has no weights"):
        read_source(bare)
    sharded = models.hugging_face("sharded")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelSourceError, match=r"lacks model-00002-of-00002\.safetensors"):
        read_source(sharded)
    cut = models.hugging_face("cut")
    header = json.dumps({"w": {"dtype": "F16", "shape": [8], "data_offsets": [0, 16]}}).encode()
    (cut / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(5))
    with pytest.raises(ModelSourceError, match="is truncated"):
        read_source(cut)


def test_calibration_text_is_the_users_or_ours(models: Models, tmp_path: Path) -> None:
    """Without a file the shipped samples are used; a file gives its lines in order, as many as asked for."""
    folder = models.hugging_face()
    assert len(calibration_samples(make_spec(folder))) >= 20
    data = tmp_path / "lines.txt"
    data.write_text("one\n\n two \nthree\n", encoding="utf-8")
    calibration = {"data": str(data), "num_samples": 2}
    assert calibration_samples(make_spec(folder, quantization={"calibration": calibration})) == ["one", "two"]


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"prompt": "x"}\n'), ("b.jsonl", "{\n"), ("c.txt", "\n")])
def test_calibration_text_that_cannot_be_used_is_refused(models: Models, tmp_path: Path, name: str, text: str) -> None:
    """JSON lines without `text`, broken JSON and an empty file name the field and the file."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    calibration = {"data": str(tmp_path / name)}
    with pytest.raises(ConfigurationError, match=r"`quantization\.calibration\.data`"):
        calibration_samples(make_spec(models.hugging_face(), quantization={"calibration": calibration}))


@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("num_draft_tokens", [1, 5, 10])
def test_medusa_trees_are_connected_and_as_large_as_asked(num_heads: int, num_draft_tokens: int) -> None:
    """Every path's parent and better siblings are in the tree, no path is deeper than there are heads."""
    paths = medusa_choices(num_heads, num_draft_tokens)
    assert len(set(paths)) == num_draft_tokens
    assert max(map(len, paths)) <= num_heads
    for path in paths:
        assert len(path) == 1 or path[:-1] in paths
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths


def test_medusa_heads_without_their_numbers_are_refused(models: Models) -> None:
    """A folder that is not of Medusa heads is named."""
    assert read_medusa_heads(models.medusa(heads=5)) == (5, 1)
    with pytest.raises(ModelSourceError, match="medusa_num_heads"):
        read_medusa_heads(models.hugging_face())


@pytest.mark.parametrize(
    ("target", "installed", "parts"),
    [
        ("tensorrt_llm", "1.2.1", ()),
        ("tensorrt_llm", None, ("tensorrt_llm (1.2.1)", "not installed")),
        ("tensorrt_llm", "1.1.0", ("1.2.1", "1.1.0")),
        ("tensorrt_llm", "1.3.0rc26", ("removed", "trtllm-build", "tensorrt_llm_pytorch")),
        ("tensorrt_llm", "1.4.0rc1", ("removed", "tensorrt_llm_pytorch")),
        ("tensorrt_llm_pytorch", "1.2.1", ()),
        ("tensorrt_llm_pytorch", "1.4.0rc1", ()),
        ("tensorrt_llm_pytorch", "1.0.0", ("1.2 or newer", "1.0.0")),
        ("tensorrt_llm_pytorch", None, ("1.2 or newer", "not installed")),
    ],
)
def test_versions_that_do_not_fit_are_explained(
    models: Models, monkeypatch: pytest.MonkeyPatch, target: Target, installed: str | None, parts: tuple[str, ...]
) -> None:
    """Each target names the version it needs; one too new for engines is told that they are gone, and what serves."""
    monkeypatch.setattr(host, "_installed_version", lambda: installed)
    monkeypatch.setattr(host, "_num_gpus", lambda: 8)
    missing = missing_on_this_host(make_spec(models.hugging_face()), target)
    assert len(missing) == bool(parts)
    assert all(part in missing[0] for part in parts)


@pytest.mark.usefixtures("strict")
def test_a_host_with_everything_lacks_nothing(models: Models) -> None:
    """TensorRT-LLM and as many GPUs as ranks are all that is needed; one rank more is said."""
    assert missing_on_this_host(make_spec(models.hugging_face(), parallelism={"tensor": 8}), "tensorrt_llm") == []
    nine = make_spec(models.hugging_face(), parallelism={"tensor": 3, "pipeline": 3})
    assert missing_on_this_host(nine, "tensorrt_llm") == ["9 NVIDIA GPUs (one for each rank): 8 here."]


def test_the_strict_double_is_strict() -> None:
    """An unknown name, a missing one, a wrong type and a value outside its choices are all errors."""
    parameters = api()["callables"]["tensorrt_llm.quantization.quantize_and_export"]
    good = {name: {"str": "x", "int": 1}.get(one["type"]) for name, one in parameters.items() if "default" not in one}
    good |= {"device": "cuda", "dtype": "auto", "qformat": "fp8", "kv_cache_dtype": None}
    check_arguments("it", parameters, good)
    for wrong in ({"calib_sise": 3}, {"calib_size": "3"}, {"calib_size": True}, {"qformat": "fp9"}):
        with pytest.raises(StrictError):
            check_arguments("it", parameters, good | wrong)
    del good["seed"]
    with pytest.raises(StrictError, match="seed"):
        check_arguments("it", parameters, good)
