"""The generated engine script, run to its end against a TensorRT-LLM that refuses all that 1.2.1 does not have."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.targets.conftest import make_spec
from tests.support.strict_tensorrt_llm import calls

from enginehouse_builders.spec.compatibility import refusals
from enginehouse_builders.spec.model import KvType, SpeculationMethod, WeightQuantization
from enginehouse_builders.spec.support import SUPPORT
from enginehouse_builders.targets.emission import build, emit
from enginehouse_contract.errors import BuildError, ConfigurationError
from enginehouse_contract.manifest import read_manifest, verify_build

if TYPE_CHECKING:
    from pathlib import Path

    from tests.builders.targets.conftest import Models

    from enginehouse_builders.spec.model import Spec
    from enginehouse_builders.targets.emitted import EmittedTarget

TARGET = "tensorrt_llm"
ALGORITHMS = {"int8": "W8A16", "int4": "W4A16"}
FORMATS = {"fp8": "fp8", "nvfp4": "nvfp4", "int4_awq": "int4_awq", "int8_smoothquant": "int8_sq"}


def run(emitted: EmittedTarget) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would."""
    command = [sys.executable, str(emitted.script), *emitted.script_arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - our own script


def source_for(models: Models, weights: str) -> Path:
    """The folder that a kind of weights is made of: GPTQ weights are only read, never made."""
    if weights == "int4_gptq":
        stored = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
        return models.hugging_face("gptq", quantization_config=stored)
    return models.hugging_face()


def combinations(models: Models, weights: WeightQuantization) -> list[dict[str, Any]]:
    """Fields of every spec with these weights that the compatibility rules let through."""
    found = []
    kv_types = (KvType.AUTO, *SUPPORT[TARGET].kv)
    for kv, method, ranks in itertools.product(kv_types, SUPPORT[TARGET].speculation, ((1, 1), (2, 2))):
        if ranks != (1, 1) and kv is not KvType.AUTO:
            continue
        speculation: dict[str, Any] = {"method": method.value, "num_draft_tokens": 4}
        if method in {SpeculationMethod.DRAFT_TARGET, SpeculationMethod.MEDUSA}:
            speculation["draft_model"] = str(models.medusa())
        for reuse in (True, False):
            fields = {
                "quantization": {"weights": weights.value},
                "kv_cache": {"dtype": kv.value, "reuse": reuse},
                "scheduling": {"chunked_context": reuse},
                "speculation": speculation,
                "parallelism": {"tensor": ranks[0], "pipeline": ranks[1]},
            }
            if not refusals(make_spec(source_for(models, weights.value), targets=[TARGET], **fields)):
                found.append(fields)
                break
    return found


@pytest.mark.slow
@pytest.mark.parametrize("weights", SUPPORT[TARGET].weights)
@pytest.mark.usefixtures("strict")
def test_every_allowed_combination_runs_or_is_refused_by_name(
    models: Models, tmp_path: Path, weights: WeightQuantization
) -> None:
    """What the compatibility rules allow is built end to end, or refused before a script is written, naming a field."""
    built, reasons = 0, []
    for index, fields in enumerate(combinations(models, weights)):
        spec = make_spec(source_for(models, weights.value), **fields)
        try:
            emitted = emit(spec, TARGET, tmp_path / f"out-{index}")
        except ConfigurationError as error:
            reasons.append(str(error))
            continue
        done = run(emitted)
        assert done.returncode == 0, (fields, done.stderr)
        manifest = verify_build(emitted.engine_dir)
        assert manifest.target == TARGET
        ranks = spec.parallelism.world_size
        assert {f"rank{rank}.engine" for rank in range(ranks)} <= set(manifest.files)
        built += 1
    assert built >= 2
    assert all(reason.startswith("`") for reason in reasons), reasons


@pytest.mark.parametrize("weights", ["none", "int8", "int4"])
def test_weights_without_calibration_are_converted(models: Models, strict: Path, tmp_path: Path, weights: str) -> None:
    """Plain and weight-only weights go through `from_hugging_face`, once per rank, with the algorithm of their name."""
    spec = make_spec(models.hugging_face(), quantization={"weights": weights}, parallelism={"tensor": 2})
    assert run(emit(spec, TARGET, tmp_path / "out")).returncode == 0
    converted = [call["arguments"] for call in calls(strict) if call["call"].endswith("from_hugging_face")]
    assert [one["mapping"]["rank"] for one in converted] == [0, 1]
    assert {one["quant_config"]["quant_algo"] for one in converted} == {ALGORITHMS.get(weights)}
    assert {one["dtype"] for one in converted} == {"bfloat16"}


@pytest.mark.parametrize("weights", FORMATS)
def test_calibrated_weights_go_through_modelopt(models: Models, strict: Path, tmp_path: Path, weights: str) -> None:
    """Data-aware weights go through `quantize_and_export` over samples that lie beside the script."""
    data = tmp_path / "samples.jsonl"
    data.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n', encoding="utf-8")
    calibration = {"data": str(data), "num_samples": 2, "max_sample_tokens": 64}
    spec = make_spec(models.hugging_face(), quantization={"weights": weights, "calibration": calibration})
    emitted = emit(spec, TARGET, tmp_path / "out")
    assert run(emitted).returncode == 0
    lines = (emitted.folder / "calibration" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one", "two"]
    (call,) = [call["arguments"] for call in calls(strict) if call["call"].endswith("quantize_and_export")]
    assert (call["qformat"], call["calib_size"], call["calib_max_seq_length"]) == (FORMATS[weights], 2, 64)
    assert read_manifest(emitted.engine_dir).tool_versions["nvidia-modelopt"] == "0.37.0"


def test_quantized_kv_of_plain_weights_is_calibrated(models: Models, strict: Path, tmp_path: Path) -> None:
    """KV scales need data: int8 weights with an int8 KV cache go through ModelOpt, without paged context attention."""
    spec = make_spec(
        models.hugging_face(),
        quantization={"weights": "int8"},
        kv_cache={"dtype": "int8", "reuse": False},
        scheduling={"chunked_context": False},
    )
    assert run(emit(spec, TARGET, tmp_path / "out")).returncode == 0
    quantized, built = calls(strict)
    assert (quantized["arguments"]["qformat"], quantized["arguments"]["kv_cache_dtype"]) == ("int8_wo", "int8")
    assert built["arguments"]["use_paged_context_fmha"] == "disable"


def test_gptq_and_awq_folders_are_read_as_they_are(models: Models, strict: Path, tmp_path: Path) -> None:
    """A folder of GPTQ or AutoAWQ weights keeps them; the group size is the folder's."""
    for method in ("gptq", "awq"):
        stored = {"quant_method": method, "bits": 4, "group_size": 64}
        spec = make_spec(models.hugging_face(method, quantization_config=stored))
        assert run(emit(spec, TARGET, tmp_path / f"out-{method}")).returncode == 0
    gptq, awq = [call["arguments"] for call in calls(strict) if call["call"].endswith("from_hugging_face")]
    for one in (gptq, awq):
        assert one["quant_config"]["quant_algo"] == "W4A16_GPTQ"
        assert one["quant_config"]["group_size"] == 64
        assert one["quant_ckpt_path"] == one["hf_model_or_dir"]
    assert (gptq.get("use_autoawq"), awq.get("use_autoawq")) == (None, True)


def test_limits_lora_and_lookahead_reach_the_build(models: Models, strict: Path, tmp_path: Path) -> None:
    """Flags of `trtllm-build` and parameters of the Triton model say what the spec says."""
    adapters = [str(models.hugging_face(name)) for name in ("first", "second")]
    spec = make_spec(
        models.hugging_face(),
        limits={"max_batch_size": 16, "max_input_len": 1000, "max_seq_len": 2000, "max_num_tokens": 4096},
        kv_cache={"tokens_per_block": 64, "host_offload_bytes": 1 << 30, "memory_fraction": 0.8},
        scheduling={"policy": "max_utilization"},
        speculation={"method": "lookahead", "num_draft_tokens": 6},
        lora={"adapters": adapters, "max_rank": 16},
    )
    emitted = emit(spec, TARGET, tmp_path / "out")
    assert run(emitted).returncode == 0
    built = calls(strict)[-1]["arguments"]
    sizes = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "tokens_per_block", "max_lora_rank")
    assert [built[name] for name in sizes] == [16, 1000, 2000, 4096, 64, 16]
    assert built["lora_dir"] == adapters
    assert built["speculative_decoding_mode"] == "lookahead_decoding"
    assert built["max_draft_len"] == (7 - 2) + (4 - 1 + 4) * (7 - 1)
    serving = json.loads((emitted.engine_dir / "serving_parameters.json").read_text(encoding="utf-8"))
    assert serving == emitted.serving_parameters
    config = (emitted.engine_dir / "triton/tensorrt_llm/config.pbtxt").read_text(encoding="utf-8")
    assert 'backend: "tensorrtllm"' in config
    assert 'key: "batch_scheduler_policy" value { string_value: "max_utilization" }' in config
    assert serving["batch_scheduler_policy"] == "max_utilization"
    assert serving["kv_cache_host_memory_bytes"] == str(1 << 30)
    assert [serving[f"lookahead_{name}"] for name in ("window_size", "ngram_size", "verification_set_size")] == [
        "4", "7", "4",
    ]  # fmt: skip


def test_medusa_heads_are_exported_with_the_model(models: Models, strict: Path, tmp_path: Path) -> None:
    """Medusa heads are combined by the quantizer; the tree of drafts has as many nodes as the engine has room for."""
    speculation = {"method": "medusa", "num_draft_tokens": 12, "draft_model": str(models.medusa(heads=3))}
    emitted = emit(make_spec(models.hugging_face(), speculation=speculation), TARGET, tmp_path / "out")
    assert run(emitted).returncode == 0
    quantized, built = [call["arguments"] for call in calls(strict)]
    assert (quantized["num_medusa_heads"], quantized["medusa_model_dir"]) == (3, speculation["draft_model"])
    assert (built["speculative_decoding_mode"], built["max_draft_len"]) == ("medusa", 12)
    assert emitted.serving_parameters["medusa_choices"].count("{") == 12


def test_a_checkpoint_is_built_as_it_is(models: Models, strict: Path, tmp_path: Path) -> None:
    """A TensorRT-LLM checkpoint is not converted again, nor removed after the build."""
    source = models.checkpoint(world_size=2, quantization={"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    spec = make_spec(source, parallelism={"tensor": 2})
    emitted = emit(spec, TARGET, tmp_path / "out")
    assert run(emitted).returncode == 0
    assert [call["call"] for call in calls(strict)] == ["trtllm-build"]
    assert (source / "rank1.safetensors").is_file()
    assert read_manifest(emitted.engine_dir).weight_precision == "fp8"


@pytest.mark.usefixtures("strict")
def test_the_manifest_has_what_nvidias_files_lack(models: Models, tmp_path: Path) -> None:
    """GPU architecture, TensorRT and CUDA versions, digests of tokenizer and chat template, limits: all recorded."""
    emitted = emit(make_spec(models.hugging_face()), TARGET, tmp_path / "out")
    assert run(emitted).returncode == 0
    manifest = verify_build(emitted.engine_dir)
    assert manifest.tool_versions["gpu_architecture"] == "sm_90"
    assert manifest.tool_versions["tensorrt"] == "10.14.1.48"
    assert manifest.tool_versions["cuda"] == "13.0"
    assert manifest.chat_template_sha256 is not None
    assert manifest.limits.max_seq_len == 8192
    assert manifest.limits.max_input_len == 8191
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= set(manifest.files)


def test_the_same_spec_gives_the_same_files(models: Models, tmp_path: Path) -> None:
    """Nothing in the script is of this host or of now: it is the same wherever it is written."""
    spec = make_spec(models.hugging_face(), quantization={"weights": "fp8"})
    one, two = emit(spec, TARGET, tmp_path / "one"), emit(spec, TARGET, tmp_path / "two")
    for name in one.files:
        text = (one.folder / name).read_text(encoding="utf-8")
        assert text == (two.folder / name).read_text(encoding="utf-8")
        assert str(tmp_path) not in text, name


@pytest.mark.usefixtures("strict")
def test_the_id_is_of_what_decides_the_bytes(models: Models, tmp_path: Path) -> None:
    """The id is the same whatever the model's folder is called; it changes with a setting."""
    ids = []
    for name, limits in (("one", {}), ("two", {}), ("one", {"max_batch_size": 3})):
        emitted = emit(make_spec(models.hugging_face(name), limits=limits), TARGET, tmp_path / f"out-{len(ids)}")
        assert run(emitted).returncode == 0
        ids.append(read_manifest(emitted.engine_dir).build_id)
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.usefixtures("strict")
def test_what_a_killed_run_left_is_not_built_from(models: Models, tmp_path: Path) -> None:
    """A checkpoint and a half-made engine of a run that was killed are made anew; other files in `--work` stay."""
    emitted = emit(make_spec(models.hugging_face()), TARGET, tmp_path / "out")
    for name in ("work/checkpoint/rank7.safetensors", ".engine.partial/rank7.engine", "work/mine.txt"):
        (emitted.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (emitted.folder / name).write_bytes(b"old")
    assert run(emitted).returncode == 0
    assert "rank7.engine" not in verify_build(emitted.engine_dir).files
    assert (emitted.folder / "work" / "mine.txt").is_file()
    assert not (emitted.folder / "work" / "checkpoint").exists()


@pytest.mark.usefixtures("strict")
def test_an_engine_is_never_overwritten(models: Models, tmp_path: Path) -> None:
    """A second run of the script leaves the engine alone and says so; a second emission needs an empty folder."""
    spec = make_spec(models.hugging_face())
    emitted = emit(spec, TARGET, tmp_path / "out")
    assert run(emitted).returncode == 0
    again = run(emitted)
    assert again.returncode == 1
    assert "never overwritten" in again.stderr
    with pytest.raises(BuildError, match="not empty"):
        emit(spec, TARGET, tmp_path / "out")


@pytest.mark.usefixtures("strict")
def test_a_newer_tensorrt_llm_is_told_where_engines_went(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 1.3 the script ends with one sentence that names the last version and the other target."""
    monkeypatch.setenv("STRICT_TENSORRT_LLM_VERSION", "1.3.0rc26")
    done = run(emit(make_spec(models.hugging_face()), TARGET, tmp_path / "out"))
    assert done.returncode == 1
    assert "1.2.1" in done.stderr
    assert "tensorrt_llm_pytorch" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("strict")
def test_too_few_gpus_are_named(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script counts GPUs before it spends hours."""
    monkeypatch.setenv("STRICT_NUM_GPUS", "1")
    spec = make_spec(models.hugging_face(), parallelism={"tensor": 2})
    done = run(emit(spec, TARGET, tmp_path / "out"))
    assert done.returncode == 1
    assert "needs 2 GPU(s); 1 are visible" in done.stderr


@pytest.mark.usefixtures("strict")
def test_build_runs_the_script_where_it_can(models: Models, tmp_path: Path) -> None:
    """With TensorRT-LLM 1.2.1 and GPUs, `build` returns a sound build."""
    result = build(make_spec(models.hugging_face()), TARGET, tmp_path / "out")
    assert result["build_id"] == read_manifest(tmp_path / "out" / "engine").build_id


def test_build_refuses_with_what_is_missing_and_where_the_script_is(models: Models, tmp_path: Path) -> None:
    """Elsewhere `build` writes the script and refuses, naming the package, its version, the GPUs and the container."""
    with pytest.raises(BuildError) as refused:
        build(make_spec(models.hugging_face(), parallelism={"tensor": 4}), TARGET, tmp_path / "out")
    message = str(refused.value)
    for part in ("tensorrt_llm (1.2.1)", "4 NVIDIA GPUs", str(tmp_path / "out" / "build_engine.py"), "docker run"):
        assert part in message
    assert (tmp_path / "out" / "build_engine.py").is_file()


def test_a_failing_script_shows_its_end(models: Models, strict: Path, tmp_path: Path) -> None:
    """When TensorRT-LLM fails, the error has the last lines, the log's place and the command; no engine appears."""
    (strict / "bin" / "trtllm-build").write_text("#!/bin/sh\necho out of memory; exit 3\n", encoding="utf-8")
    with pytest.raises(BuildError, match=r"(?s)out of memory.*build\.log.*run it again"):
        build(make_spec(models.hugging_face()), TARGET, tmp_path / "out")
    assert not (tmp_path / "out" / "engine").exists()


def refused(spec: Spec, tmp_path: Path, *parts: str) -> None:
    """Assert that nothing is written for *spec* and that the message has these parts."""
    with pytest.raises(ConfigurationError) as error:
        emit(spec, TARGET, tmp_path / "refused")
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "refused").exists()


def test_what_the_files_cannot_give_is_refused_by_name(models: Models, tmp_path: Path) -> None:
    """Refusals that need the model's files name the field, what is there, and what to do."""
    plain = models.hugging_face()
    refused(make_spec(plain, quantization={"weights": "int4_gptq"}), tmp_path, "quantization.weights", "int4_awq")
    refused(
        make_spec(plain, quantization={"weights": "int4", "group_size": 64}), tmp_path, "quantization.group_size", "64"
    )
    refused(make_spec(plain, kv_cache={"dtype": "f16"}), tmp_path, "kv_cache.dtype", "bfloat16")
    gptq = models.hugging_face("gptq", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    refused(make_spec(gptq, quantization={"weights": "fp8"}), tmp_path, "quantization.weights", "int4_gptq")
    refused(make_spec(gptq, kv_cache={"dtype": "fp8"}), tmp_path, "kv_cache.dtype", "calibration")
    checkpoint = models.checkpoint(world_size=2)
    refused(make_spec(checkpoint), tmp_path, "parallelism.tensor", "2")
    lora = {"adapters": [str(plain)], "target_modules": ["q_proj"]}
    refused(make_spec(plain, lora=lora), tmp_path, "lora.target_modules", "attn_q", "given q_proj")
    experts = {"tensor": 2, "expert": 2}
    refused(
        make_spec(plain, quantization={"weights": "fp8"}, parallelism=experts),
        tmp_path,
        "parallelism.expert",
        "limit 1",
    )
    for method in ("ngram", "mtp"):
        refused(
            make_spec(plain, speculation={"method": method}), tmp_path, "speculation.method", "tensorrt_llm_pytorch"
        )
