"""Builds for TensorRT-LLM's LLM API: arguments, the gathered folder, and the Triton model over a scripted LLM."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from tests.builders.targets.conftest import make_spec
from tests.support.scripted_llm import Request, ScriptedLlm, make_modules
from tests.support.strict_tensorrt_llm import calls

from enginehouse_builders.spec.compatibility import refusals
from enginehouse_builders.spec.support import SUPPORT
from enginehouse_builders.targets.emission import emit
from enginehouse_contract.errors import ConfigurationError
from enginehouse_contract.manifest import verify_build
from enginehouse_contract.tensors import TENSORRT_LLM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.builders.targets.conftest import Models

    from enginehouse_builders.targets.emitted import EmittedTarget

TARGET = "tensorrt_llm_pytorch"
REQUESTED = [tensor.name for tensor in TENSORRT_LLM.outputs] + ["num_cached_input_tokens"]
STORED = {
    "none": {},
    "as_in_file": {},
    "int4_awq": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128},
    "int4_gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


def run(emitted: EmittedTarget) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would."""
    command = [sys.executable, str(emitted.script), *emitted.script_arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603 - our own script


@pytest.mark.slow
@pytest.mark.parametrize("weights", STORED)
def test_every_allowed_combination_is_taken_by_the_llm_api(
    models: Models, strict: Path, tmp_path: Path, weights: str
) -> None:
    """Whatever the compatibility rules allow gives arguments that the recorded `TorchLlmArgs` takes."""
    stored = {"quantization_config": STORED[weights]} if STORED[weights] else {}
    source, draft = models.hugging_face(**stored), models.hugging_face("draft")
    assert set(STORED) == {one.value for one in SUPPORT[TARGET].weights}
    built = 0
    for kv, method in itertools.product(("auto", "fp8", "bf16"), SUPPORT[TARGET].speculation):
        speculation: dict[str, Any] = {"method": method.value}
        if method.value in {"draft_target", "eagle3"}:
            speculation["draft_model"] = str(draft)
        spec = make_spec(
            source,
            targets=[TARGET],
            quantization={"weights": weights},
            kv_cache={"dtype": kv, "host_offload_bytes": 1 << 20},
            speculation=speculation,
            parallelism={"tensor": 4, "pipeline": 2, "expert": 2},
        )
        assert not refusals(spec)
        emitted = emit(spec, TARGET, tmp_path / f"{kv}-{method.value}")
        done = run(emitted)
        assert done.returncode == 0, done.stderr
        assert verify_build(emitted.engine_dir).target == TARGET
        built += 1
    taken = [call["arguments"] for call in calls(strict)]
    assert len(taken) == built
    assert {arguments["kv_cache_config"]["dtype"] for arguments in taken} == {"auto", "fp8"}


def test_the_build_holds_all_that_serves_it(models: Models, strict: Path, tmp_path: Path) -> None:
    """Weights, draft model, adapters, tokenizer, arguments and the Triton model lie in one folder, with digests."""
    adapter, draft = models.hugging_face("adapter"), models.hugging_face("draft")
    spec = make_spec(
        models.hugging_face(),
        speculation={"method": "eagle3", "draft_model": str(draft), "num_draft_tokens": 3},
        lora={"adapters": [str(adapter)], "max_rank": 8},
        limits={"max_batch_size": 4, "max_seq_len": 512},
    )
    emitted = emit(spec, TARGET, tmp_path / "out")
    assert run(emitted).returncode == 0
    manifest = verify_build(emitted.engine_dir)
    expected = {
        "model/model.safetensors", "draft/model.safetensors", "lora/0/model.safetensors", "model.yaml", "config.json",
        "tokenizer.json", "triton/tensorrt_llm/config.pbtxt", "triton/tensorrt_llm/1/model.py",
    }  # fmt: skip
    assert expected <= set(manifest.files)
    (arguments,) = [call["arguments"] for call in calls(strict)]
    assert arguments["speculative_config"]["decoding_type"] == "Eagle"
    assert arguments["speculative_config"]["max_draft_len"] == 3
    assert arguments["lora_config"]["max_lora_rank"] == 8
    written = yaml.safe_load((emitted.engine_dir / "model.yaml").read_text(encoding="utf-8"))
    assert written["kv_cache_config"] == arguments["kv_cache_config"]
    assert manifest.tool_versions["gpu_architecture"] == "sm_90"
    config = json.loads((emitted.engine_dir / "config.json").read_text(encoding="utf-8"))
    assert config["pretrained_config"]["mapping"]["world_size"] == 1


def test_the_triton_config_has_the_contracts_tensors(models: Models, tmp_path: Path) -> None:
    """The Triton model declares every tensor of the contract and answers in decoupled mode from Python."""
    emitted = emit(make_spec(models.hugging_face(), limits={"max_batch_size": 4}), TARGET, tmp_path / "out")
    text = (emitted.folder / "build/triton/tensorrt_llm/config.pbtxt").read_text(encoding="utf-8")
    assert 'backend: "python"' in text
    assert "max_batch_size: 4\n" in text
    assert "decoupled: true" in text
    assert all(f'name: "{tensor.name}"' in text for tensor in (*TENSORRT_LLM.inputs, *TENSORRT_LLM.outputs))


def test_what_the_llm_api_cannot_serve_is_refused_by_name(models: Models, tmp_path: Path) -> None:
    """Quantization that the folder does not hold, beams, checkpoints and engine-only speculation are refused."""
    plain = models.hugging_face()
    for fields, parts in (
        ({"quantization": {"weights": "fp8"}}, ("quantization.weights", "none", "ModelOpt")),
        ({"limits": {"max_beam_width": 2}}, ("limits.max_beam_width", "tensorrt_llm")),
        ({"speculation": {"method": "lookahead"}}, ("speculation.method", "tensorrt_llm")),
        ({"kv_cache": {"dtype": "f16"}}, ("kv_cache.dtype", "bfloat16")),
    ):
        with pytest.raises(ConfigurationError) as error:
            emit(make_spec(plain, **fields), TARGET, tmp_path / "out")
        assert all(part in str(error.value) for part in parts), error.value
    with pytest.raises(ConfigurationError, match=r"model\.source"):
        emit(make_spec(models.checkpoint()), TARGET, tmp_path / "out")


@pytest.fixture
def model(models: Models, strict: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The shipped Triton model, loaded from a build as Triton does, over a scripted LLM."""
    adapter = models.hugging_face("adapter")
    spec = make_spec(
        models.hugging_face(), lora={"adapters": [str(adapter)]}, limits={"max_batch_size": 4, "max_seq_len": 64}
    )
    emitted = emit(spec, TARGET, tmp_path / "out")
    assert run(emitted).returncode == 0, strict
    for name, module in make_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    path = emitted.engine_dir / "triton/tensorrt_llm/1/model.py"
    loader = importlib.util.spec_from_file_location("shipped_llm_api_model", path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    monkeypatch.setitem(sys.modules, "shipped_llm_api_model", module)
    loader.loader.exec_module(module)
    instance = module.TritonPythonModel()
    parameters = {"gpt_model_path": {"string_value": str(emitted.engine_dir)}}
    instance.initialize({"model_config": json.dumps({"parameters": parameters})})
    yield instance
    instance.finalize()
    assert instance._llm.is_shut_down


def tensors(prompts: list[list[int]], **values: Any) -> dict[str, Any]:
    """Inputs of one request: a row per prompt."""
    rows = len(prompts)
    width = max(map(len, prompts))
    given = {
        "input_ids": np.array([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], np.int32),
        "input_lengths": np.array([[len(prompt)] for prompt in prompts], np.int32),
        "request_output_len": np.full((rows, 1), 10, np.int32),
    }
    return given | {name: np.array([value] * rows) for name, value in values.items()}


def ask(model: Any, inputs: dict[str, Any], request_id: str = "") -> list[Any]:
    """Send one request and return its responses."""
    request = Request(inputs, REQUESTED, request_id)
    model.execute([request])
    assert request.sender.is_final.wait(10)
    return request.sender.responses


def ids_of(responses: list[Any]) -> list[list[int]]:
    """Token ids of each response."""
    return [response.tensors["output_ids"][0, 0].tolist() for response in responses]


def test_streams_carry_new_tokens_and_others_the_prompt_too(model: Any) -> None:
    """A stream has deltas only; a single answer has the prompt unless it is excluded."""
    assert ids_of(ask(model, tensors([[1, 2]], streaming=[True]))) == [[5], [6, 7], [8]]
    assert ids_of(ask(model, tensors([[1, 2]]))) == [[1, 2, 5, 6, 7, 8]]
    assert ids_of(ask(model, tensors([[1, 2]], exclude_input_in_output=[True]))) == [[5, 6, 7, 8]]


def test_rows_and_sequences_are_streams_of_their_own(model: Any) -> None:
    """Each row and each returned sequence answers by itself, tagged, with its own prompt; FINAL comes once, last."""
    responses = ask(model, tensors([[1, 2, 3], [4]], num_return_sequences=[2]))
    tags = [(int(r.tensors["batch_index"][0, 0]), int(r.tensors["sequence_index"][0, 0])) for r in responses]
    assert sorted(tags) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    by_tag = dict(zip(tags, ids_of(responses), strict=True))
    assert by_tag[0, 1] == [1, 2, 3, 5, 6, 7, 8]
    assert by_tag[1, 0] == [4, 5, 6, 7, 8]


def test_a_stop_word_of_several_tokens_ends_a_sequence(model: Any) -> None:
    """Stop words are matched across steps; the word stays in the answer, and the LLM is told to stop."""
    words = np.array([[6, 7], [2, -1]], np.int32)
    assert ids_of(ask(model, tensors([[1]], stop_words_list=words, streaming=[True]))) == [[5], [6, 7]]
    assert model._llm.requests[-1].is_aborted


def test_sampling_reaches_the_llm_and_unset_values_do_not(model: Any) -> None:
    """Values arrive under the LLM API's names; a zero top_k and a non-positive top_p mean unset, as at NVIDIA's."""
    inputs = tensors([[1]], temperature=np.array([0.5], np.float32), runtime_top_k=[0], seed=[7], min_length=[2])
    ask(model, inputs | {"runtime_top_p": np.array([[0.9]], np.float32), "end_id": np.array([[2]], np.int32)})
    sampling = model._llm.requests[-1].given["sampling_params"]
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.min_tokens) == (0.5, None, 7, 2)
    assert sampling.top_p == pytest.approx(0.9)
    assert (sampling.end_id, sampling.pad_id, sampling.detokenize) == (2, 2, False)
    ask(model, tensors([[1]], bad_words_list=np.array([[9, 4], [1, 2]], np.int32)))
    assert model._llm.requests[-1].given["sampling_params"].bad_token_ids == [9, 4]
    ask(model, tensors([[1]], embedding_bias=np.array([0.0, -2.0], np.float32)))
    assert model._llm.requests[-1].given["sampling_params"].embedding_bias.tolist() == [0.0, -2.0]


def test_counts_log_probs_and_measurements(model: Any) -> None:
    """Token counts are of the response they come with; measurements come with the last; times in nanoseconds."""
    flags = ("return_log_probs", "return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics")
    responses = ask(model, tensors([[1, 2]], streaming=[True], **{name: [True] for name in flags}))
    assert [int(r.tensors["num_output_tokens"][0, 0]) for r in responses] == [1, 2, 1]
    assert {int(r.tensors["num_input_tokens"][0, 0]) for r in responses} == {2}
    assert responses[1].tensors["output_log_probs"][0, 0].tolist() == pytest.approx([-0.6, -0.7])
    last = responses[-1].tensors
    assert "arrival_time_ns" not in responses[0].tensors
    assert int(last["last_token_time_ns"][0, 0]) == 4_000_000_000
    assert int(last["kv_cache_reused_blocks"][0, 0]) == 1
    assert float(last["acceptance_rate"][0, 0]) == 0.5
    assert int(last["num_cached_input_tokens"][0, 0]) == 4


def test_every_output_has_the_type_and_rank_of_the_contract(model: Any) -> None:
    """What is sent is what `config.pbtxt` declares, with a batch dimension of one."""
    kinds = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32}
    flags = ("return_log_probs", "return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics")
    responses = ask(model, tensors([[1], [2]], num_return_sequences=[2], **{name: [True] for name in flags}))
    for name, array in responses[-1].tensors.items():
        declared = TENSORRT_LLM.output(name)
        assert array.dtype == kinds[declared.data_type], name
        assert array.ndim == len(declared.dims) + 1, name
        assert array.shape[0] == 1, name


def test_adapters_are_chosen_by_task_id(model: Any) -> None:
    """`lora_task_id` n is the n-th adapter of the spec; a number beyond is refused."""
    ask(model, tensors([[1]], lora_task_id=[1]))
    request = model._llm.requests[-1].given["lora_request"]
    assert request.lora_path == model._llm.arguments["lora_config"]["lora_dir"][0]
    (refused,) = ask(model, tensors([[1]], lora_task_id=[2]))
    assert "`lora_task_id`" in str(refused.error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_input_ids", [3]),
        ("return_context_logits", [True]),
        ("beam_width", [2]),
        ("request_output_len", [99]),
        ("input_lengths", [0]),
        ("bad_words_list", [[1, 2], [2, -1]]),
        ("guided_decoding_guide", [b"{}"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(model: Any, name: str, value: list[Any]) -> None:
    """A request that asks for something else is refused under INVALID_ARG, in one response, before anything runs."""
    inputs = tensors([[1, 2]]) | {name: np.array([value])}
    (response,) = ask(model, inputs)
    assert response.error.code == "INVALID_ARG"
    assert name.removeprefix("return_context_") in str(response.error) or "input_ids" in str(response.error)
    assert not model._llm.requests


def test_a_failing_llm_is_an_internal_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the LLM API raises ends the request with its message."""
    monkeypatch.setattr(ScriptedLlm, "error", RuntimeError("out of blocks"))
    (response,) = ask(model, tensors([[1]]))
    assert response.error.code == "INTERNAL"
    assert "out of blocks" in str(response.error)


def test_stop_ends_the_request_of_that_id(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `stop` request answers without data; the request in flight under its id ends with what it has."""
    monkeypatch.setattr(ScriptedLlm, "is_endless", True)
    running = Request(tensors([[1]], streaming=[True]), REQUESTED, "same")
    model.execute([running])
    while not running.sender.responses:
        assert not running.sender.is_final.wait(0.01)
    assert ask(model, tensors([[1]], stop=[True]), "same") == []
    assert running.sender.is_final.wait(10)
    assert running.sender.responses[-1].error is None
    (refused,) = ask(model, tensors([[1]], stop=[True]))
    assert "`stop`" in str(refused.error)


def test_a_client_that_leaves_stops_the_llm(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancellation aborts what the LLM computes and ends the request, once."""
    monkeypatch.setattr(ScriptedLlm, "is_endless", True)
    request = Request(tensors([[1]], streaming=[True]), REQUESTED)
    model.execute([request])
    while not request.sender.responses:
        assert not request.sender.is_final.wait(0.01)
    request.sender.has_left = True
    assert request.sender.is_final.wait(10)
    assert request.sender.responses[-1].error.code == "CANCELLED"
    assert model._llm.requests[-1].is_aborted


def test_a_client_that_left_before_the_start_costs_nothing(model: Any) -> None:
    """A request whose client is gone when it is looked at never reaches the LLM."""
    request = Request(tensors([[1]]), REQUESTED)
    request.sender.has_left = True
    model.execute([request])
    assert request.sender.is_final.wait(10)
    assert request.sender.responses[-1].error.code == "CANCELLED"
    assert not model._llm.requests
