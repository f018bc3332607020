"""What targets and GPUs refuse, by name."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest

from enginehouse_builders.spec.compatibility import device_refusals, refusals
from enginehouse_builders.spec.model import (
    ComputeType,
    KvType,
    SourceFormat,
    Spec,
    SpeculationMethod,
    WeightQuantization,
)
from enginehouse_builders.spec.support import INSTEAD, SUPPORT
from enginehouse_contract.manifest import Target


def _spec(target: str, **parts: Any) -> Spec:
    return Spec.model_validate({"name": "m", "model": {"source": "m"}, "targets": [target], **parts})


def _fields(spec: Spec, source: SourceFormat | None = None) -> list[str]:
    return [problem.field for problem in refusals(spec, source)]


def test_every_target_has_its_table() -> None:
    """Each target of the contract is described, and each advice is about something that its target refuses."""
    assert set(SUPPORT) == set(get_args(Target))
    for target, given in INSTEAD:
        support = SUPPORT[target]
        tables = (support.sources, support.dtypes, support.weights, support.kv, support.speculation)
        kinds = (SourceFormat, ComputeType, WeightQuantization, KvType, SpeculationMethod)
        known = [table for table, kind in zip(tables, kinds, strict=True) if given in {one.value for one in kind}]
        assert any(given not in {one.value for one in table} for table in known), (target, given)


@pytest.mark.parametrize("target", get_args(Target))
def test_defaults_are_never_refused(target: str) -> None:
    """A spec that says nothing but a target is taken by it."""
    assert _fields(_spec(target)) == []


@pytest.mark.parametrize(("target", "weights"), list(product(get_args(Target), WeightQuantization)))
def test_weights_are_taken_or_refused_by_name(target: Target, weights: WeightQuantization) -> None:
    """Each kind of weights is either in a target's table or refused by its own name and the target's."""
    found = refusals(_spec(target, quantization={"weights": weights.value}))
    if weights in SUPPORT[target].weights:
        assert found == []
    else:
        assert [problem.field for problem in found] == ["quantization.weights"]
        assert f"`{target}`" in found[0].message
        assert weights.value in found[0].message


@pytest.mark.parametrize(("target", "kv"), list(product(get_args(Target), KvType)))
def test_kv_types_are_taken_or_refused_by_name(target: Target, kv: KvType) -> None:
    """The same for the KV cache's types; `auto` is always taken."""
    off = {"kv_cache": {"dtype": kv.value, "reuse": False}, "scheduling": {"chunked_context": False}}
    is_taken = kv is KvType.AUTO or kv in SUPPORT[target].kv
    assert _fields(_spec(target, **off)) == ([] if is_taken else ["kv_cache.dtype"])


@pytest.mark.parametrize(("target", "method"), list(product(get_args(Target), SpeculationMethod)))
def test_speculation_is_taken_or_refused_by_name(target: Target, method: SpeculationMethod) -> None:
    """The same for ways to speculate."""
    needs = {SpeculationMethod.DRAFT_TARGET, SpeculationMethod.EAGLE3, SpeculationMethod.MEDUSA}
    speculation = {"method": method.value, **({"draft_model": "d"} if method in needs else {})}
    is_taken = method in SUPPORT[target].speculation
    assert _fields(_spec(target, speculation=speculation)) == ([] if is_taken else ["speculation.method"])


@pytest.mark.parametrize(
    ("target", "parts", "field"),
    [
        ("cpu", {"limits": {"max_beam_width": 2}}, "limits.max_beam_width"),
        ("cpu", {"parallelism": {"pipeline": 2}}, "parallelism.pipeline"),
        ("cpu", {"kv_cache": {"tokens_per_block": 64}}, "kv_cache.tokens_per_block"),
        ("cpu", {"kv_cache": {"host_offload_bytes": 1}}, "kv_cache.host_offload_bytes"),
        ("cpu", {"lora": {"adapters": ["a"]}}, "lora"),
        ("cpu", {"dtype": "bf16"}, "dtype"),
        ("cpu", {"quantization": {"weights": "int8", "group_size": 64}}, "quantization.group_size"),
        ("cpu", {"limits": {"max_batch_size": 64, "max_num_tokens": 32}}, "limits.max_num_tokens"),
        ("tensorrt_llm", {"kv_cache": {"dtype": "int8", "reuse": True}, "scheduling": {"chunked_context": False}},
         "kv_cache.reuse"),
        ("tensorrt_llm", {"kv_cache": {"dtype": "fp8", "reuse": False}}, "scheduling.chunked_context"),
        ("tensorrt_llm", {"speculation": {"method": "draft_target", "draft_model": "d"}, "kv_cache": {"reuse": False}},
         "kv_cache.reuse"),
        ("tensorrt_llm", {"speculation": {"method": "lookahead"}, "limits": {"max_beam_width": 2}},
         "limits.max_beam_width"),
        ("tensorrt_llm", {"kv_cache": {"tokens_per_block": 48}}, "kv_cache.tokens_per_block"),
        ("tensorrt_llm", {"kv_cache": {"host_offload_bytes": 10, "reuse": False}}, "kv_cache.host_offload_bytes"),
        ("tensorrt_llm", {"lora": {"adapters": []}}, "lora.adapters"),
        ("tensorrt_llm", {"dtype": "bf16", "kv_cache": {"dtype": "f16"}}, "kv_cache.dtype"),
        ("tensorrt_llm_pytorch", {"limits": {"max_beam_width": 2}}, "limits.max_beam_width"),
        ("tensorrt_llm", {"limits": {"max_input_len": 9000, "max_num_tokens": 8192},
                          "scheduling": {"chunked_context": False}}, "limits.max_input_len"),
    ],
)  # fmt: skip
def test_conflicts_are_found(target: str, parts: dict[str, Any], field: str) -> None:
    """Options that exclude one another, or that a target has no use for, are refused at the field to change."""
    assert _fields(_spec(target, **parts)) == [field]


def test_sources_a_target_cannot_read() -> None:
    """TensorRT-LLM reads no GGUF, the CPU no checkpoint; calibrated int4 on a CPU needs the unquantized model."""
    assert _fields(_spec("tensorrt_llm"), SourceFormat.GGUF) == ["model.source"]
    assert _fields(_spec("cpu"), SourceFormat.TENSORRT_LLM_CHECKPOINT) == ["model.source"]
    awq = _spec("cpu", quantization={"weights": "int4_awq"})
    assert _fields(awq, SourceFormat.GGUF) == ["quantization.weights"]
    assert _fields(awq, SourceFormat.HUGGING_FACE) == []


@pytest.mark.parametrize(
    ("sm", "parts", "fields"),
    [
        (75, {}, ["device"]),
        (80, {"quantization": {"weights": "fp8"}}, ["quantization.weights"]),
        (89, {"quantization": {"weights": "fp8"}}, []),
        (90, {"quantization": {"weights": "nvfp4"}}, ["quantization.weights"]),
        (100, {"quantization": {"weights": "nvfp4"}}, []),
        (100, {"quantization": {"weights": "int4_awq"}}, ["quantization.weights"]),
        (100, {"kv_cache": {"dtype": "int8"}}, ["kv_cache.dtype"]),
        (90, {"kv_cache": {"dtype": "int8"}}, []),
    ],
)
def test_architectures_take_what_they_have_kernels_for(sm: int, parts: dict[str, Any], fields: list[str]) -> None:
    """A GPU refuses what TensorRT-LLM has no kernels for on its architecture, and names what it takes."""
    found = device_refusals(_spec("tensorrt_llm", **parts), "tensorrt_llm", sm, "gpu")
    assert [problem.field for problem in found] == fields
    assert all(f"SM {sm}" in problem.message for problem in found)
