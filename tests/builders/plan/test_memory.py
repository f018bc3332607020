"""Bytes of a plan against published figures: parameters, KV per token, and NVIDIA's worked example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.model_configs import write_config

from enginehouse_builders.plan.memory import activations_bytes, kv_bytes_per_token, plan_memory
from enginehouse_builders.plan.reading import read_shape
from enginehouse_builders.plan.request import memory_request
from enginehouse_builders.plan.weights import weights_bytes_per_rank
from enginehouse_builders.spec.model import Spec
from enginehouse_contract.manifest import read_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse_builders.plan.request import MemoryRequest
    from enginehouse_builders.plan.shape import ModelShape

_MIB = 1 << 20


def _spec(target: str = "tensorrt_llm", **parts: Any) -> Spec:
    return Spec.model_validate({"name": "m", "model": {"source": "m"}, "targets": [target], **parts})


def _request(shape: ModelShape, target: str = "tensorrt_llm", **parts: Any) -> MemoryRequest:
    spec = _spec(target, **parts)
    return memory_request(spec, shape, spec.targets[0])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.74),
        ("llama-2-13b", 13.02),
        ("llama-2-70b", 68.98),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.9),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("mixtral-8x7b", 46.7),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-0.5b", 0.494),
        ("qwen3-8b", 8.19),
        ("deepseek-v3", 671.0),
    ],
)
def test_counts_the_values_that_publishers_state(tmp_path: Path, name: str, billions: float) -> None:
    """The values counted from a config are the published number of parameters, to half a percent."""
    shape = read_shape(write_config(tmp_path, name))
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama-2-7b", 524_288),
        ("llama-2-13b", 819_200),
        ("llama-2-70b", 327_680),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("llama-3.2-1b", 32_768),
        ("llama-3.2-3b", 114_688),
        ("mistral-7b", 131_072),
        ("mixtral-8x7b", 131_072),
        ("qwen2.5-7b", 57_344),
        ("qwen2.5-0.5b", 12_288),
        ("qwen3-8b", 147_456),
        ("deepseek-v3", 61 * 576 * 2),
    ],
)
def test_kv_bytes_per_token_are_the_published_ones(tmp_path: Path, name: str, num_bytes: int) -> None:
    """A token's KV bytes are exactly the published ones in 16 bits, and half of them in fp8."""
    shape = read_shape(write_config(tmp_path, name))
    assert kv_bytes_per_token(shape, _request(shape)) == num_bytes
    assert kv_bytes_per_token(shape, _request(shape, kv_cache={"dtype": "fp8"})) == num_bytes // 2


def test_nvidias_worked_example(tmp_path: Path) -> None:
    """The example of TensorRT-LLM's memory documentation: Llama-2-7B in fp8 with fp8 KV on an H100, within 2 %.

    It states an engine of 6695 MiB, 262,144 bytes a token, and 4060 blocks of 64 tokens in 63.44 GiB.
    """
    shape = read_shape(write_config(tmp_path, "llama-2-7b"))
    kv = {"dtype": "fp8", "tokens_per_block": 64}
    request = _request(shape, quantization={"weights": "fp8"}, kv_cache=kv)
    plan = plan_memory(shape, request, int(79.10 * 2**30))
    assert plan.weights_bytes == pytest.approx(6695 * _MIB, rel=0.01)
    assert plan.kv_bytes_per_token == 262_144
    assert plan.num_kv_tokens == pytest.approx(4060 * 64, rel=0.02)
    assert plan.kv_pool_bytes == pytest.approx(63.44 * 2**30, rel=0.02)


def test_activations_are_aiconfigurators(tmp_path: Path) -> None:
    """Llama-3-8B with 8192 tokens a step: 738,197,504 bytes, aiconfigurator's own figure."""
    shape = read_shape(write_config(tmp_path, "llama-3.1-8b"))
    assert activations_bytes(shape, _request(shape)) == 738_197_504


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_ranks_hold_the_whole_model(tmp_path: Path, tensor: int, pipeline: int) -> None:
    """All ranks together hold every matrix once, and the embedding once per tensor rank."""
    shape = read_shape(write_config(tmp_path, "llama-3.1-70b"))
    request = _request(shape, parallelism={"tensor": tensor, "pipeline": pipeline})
    stages = weights_bytes_per_rank(shape, request)
    assert len(stages) == pipeline
    expected = 2 * (shape.num_params + (tensor - 1) * shape.embedding_params)
    assert sum(stages) * tensor == pytest.approx(expected, rel=1e-6)


def test_sequences_that_fit_are_counted_in_blocks(tmp_path: Path) -> None:
    """A pool holds as many sequences as whole blocks allow, never one more; beams take theirs."""
    shape = read_shape(write_config(tmp_path, "llama-3.1-8b"))
    for beams in (1, 4):
        request = _request(shape, limits={"max_beam_width": beams, "max_seq_len": 4096})
        plan = plan_memory(shape, request, 80 << 30)
        for length in (1, 31, 32, 33, 1000, 4096):
            blocks = -(-length // 32) * 32 * beams * plan.kv_bytes_per_token
            assert plan.num_sequences_of(length) * blocks <= plan.kv_pool_bytes
            assert (plan.num_sequences_of(length) + 1) * blocks > plan.kv_pool_bytes
        assert plan.fits


def test_a_draft_model_takes_its_share(tmp_path: Path) -> None:
    """A draft model adds its weights and its KV to the target's."""
    shape = read_shape(write_config(tmp_path, "llama-3.1-70b"))
    draft = read_shape(write_config(tmp_path, "llama-3.1-8b"))
    spec = _spec()
    alone = plan_memory(shape, memory_request(spec, shape, "tensorrt_llm"), 400 << 30)
    both = plan_memory(shape, memory_request(spec, shape, "tensorrt_llm", draft), 400 << 30)
    assert both.draft_bytes == pytest.approx(2 * draft.num_params, rel=1e-6)
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token + 131_072
    assert both.kv_pool_bytes < alone.kv_pool_bytes


@pytest.mark.model
def test_a_cpu_build_is_as_large_as_planned(smollm2_gguf: Path, smollm2_build: Path, smollm2_f32_build: Path) -> None:
    """The weights file of a real build is within 1 % of its plan, kept as in the file and in f32."""
    shape = read_shape(smollm2_gguf)
    for build_dir, weights, dtype in ((smollm2_build, None, "auto"), (smollm2_f32_build, "none", "f32")):
        request = _request(shape, "cpu", quantization={"weights": weights}, dtype=dtype)
        actual = read_manifest(build_dir).files["openvino_model.bin"].num_bytes
        assert max(weights_bytes_per_rank(shape, request)) == pytest.approx(actual, rel=0.01)
