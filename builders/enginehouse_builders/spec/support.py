"""What each target takes, as tables: sources, weights, KV types, ways to speculate, and the GPUs that know a type.

``cpu`` is this project's own engine. The GPU rows are TensorRT-LLM 1.2.1's: `BuildConfig` and `build()` of its engine
builder for ``tensorrt_llm``, its LLM API for ``tensorrt_llm_pytorch``, and the hardware matrix of its documentation
(``docs/source/features/quantization.md``). Every refusal quotes a reason from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from enginehouse_builders.spec.model import ComputeType, KvType, SourceFormat, SpeculationMethod, WeightQuantization

if TYPE_CHECKING:
    from enginehouse_contract.manifest import Target


@dataclass(frozen=True, slots=True)
class TargetSupport:
    """What one target takes."""

    sources: tuple[SourceFormat, ...]
    dtypes: tuple[ComputeType, ...]
    weights: tuple[WeightQuantization, ...]
    kv: tuple[KvType, ...]
    speculation: tuple[SpeculationMethod, ...]


_W, _K, _S = WeightQuantization, KvType, SpeculationMethod

SUPPORT: Final[dict[Target, TargetSupport]] = {
    "cpu": TargetSupport(
        sources=(SourceFormat.GGUF, SourceFormat.HUGGING_FACE),
        dtypes=(ComputeType.F32, ComputeType.F16),
        weights=(_W.NONE, _W.AS_IN_FILE, _W.INT8, _W.INT4, _W.INT4_AWQ, _W.INT4_GPTQ),
        kv=(_K.U8, _K.F16, _K.F32),
        speculation=(_S.NONE, _S.NGRAM, _S.DRAFT_TARGET),
    ),
    "tensorrt_llm": TargetSupport(
        sources=(SourceFormat.HUGGING_FACE, SourceFormat.TENSORRT_LLM_CHECKPOINT),
        dtypes=(ComputeType.F32, ComputeType.F16, ComputeType.BF16),
        weights=(
            _W.NONE,
            _W.AS_IN_FILE,
            _W.INT8,
            _W.INT8_SMOOTHQUANT,
            _W.INT4,
            _W.INT4_AWQ,
            _W.INT4_GPTQ,
            _W.FP8,
            _W.NVFP4,
        ),
        kv=(_K.INT8, _K.FP8, _K.F16, _K.BF16, _K.F32),
        speculation=(_S.NONE, _S.DRAFT_TARGET, _S.MEDUSA, _S.LOOKAHEAD),
    ),
    "tensorrt_llm_pytorch": TargetSupport(
        sources=(SourceFormat.HUGGING_FACE,),
        dtypes=(ComputeType.F16, ComputeType.BF16),
        weights=(_W.NONE, _W.AS_IN_FILE, _W.INT4_AWQ, _W.INT4_GPTQ, _W.FP8, _W.NVFP4),
        kv=(_K.FP8, _K.F16, _K.BF16),
        speculation=(_S.NONE, _S.NGRAM, _S.DRAFT_TARGET, _S.EAGLE3, _S.MTP),
    ),
}
"""``auto`` is always taken, and is not listed."""

INSTEAD: Final[dict[tuple[Target, str], str]] = {
    ("tensorrt_llm", "ngram"): "The front door drafts by n-gram over an engine built for `draft_target`.",
    ("tensorrt_llm", "eagle3"): "Use the target `tensorrt_llm_pytorch`.",
    ("tensorrt_llm", "mtp"): "Use the target `tensorrt_llm_pytorch`.",
    ("tensorrt_llm", "u8"): "`fp8` and `int8` are as small.",
    ("tensorrt_llm_pytorch", "medusa"): "Use the target `tensorrt_llm`.",
    ("tensorrt_llm_pytorch", "lookahead"): "Use the target `tensorrt_llm`.",
    ("tensorrt_llm_pytorch", "int8"): "Use `fp8` there, or the target `tensorrt_llm`.",
    ("tensorrt_llm_pytorch", "int8_smoothquant"): "Use `fp8` there, or the target `tensorrt_llm`.",
    ("tensorrt_llm_pytorch", "int4"): "Use `int4_awq` there, or the target `tensorrt_llm`.",
    ("cpu", "fp8"): "`int8` weights and `u8` KV are as small.",
    ("cpu", "int8_smoothquant"): "Use `int8`.",
    ("cpu", "nvfp4"): "Use `int4`.",
    ("cpu", "bf16"): "Use `f16` or `f32`; `auto` keeps the weights of the file as they are.",
    ("cpu", "tensorrt_llm_checkpoint"): "Build from the Hugging Face folder or GGUF file it was made of.",
    ("tensorrt_llm", "gguf"): "TensorRT-LLM reads no GGUF; give the Hugging Face folder of the same model.",
    ("tensorrt_llm_pytorch", "gguf"): "TensorRT-LLM reads no GGUF; give the Hugging Face folder of the same model.",
}
"""(target, what it refuses) -> what to use instead, where something is nearer than the list of what it takes."""

OLDEST_GPU_SM: Final = 80
"""TensorRT-LLM 1.2 is developed and tested for Ampere and newer."""

WEIGHTS_SM: Final[dict[WeightQuantization, tuple[int, int]]] = {
    _W.FP8: (89, 999),
    _W.NVFP4: (100, 999),
    _W.INT8: (80, 99),
    _W.INT8_SMOOTHQUANT: (80, 99),
    _W.INT4: (80, 99),
    _W.INT4_AWQ: (80, 99),
    _W.INT4_GPTQ: (80, 99),
}
"""Oldest and newest architecture (compute capability without its dot) with kernels for a kind of weights."""

KV_SM: Final[dict[KvType, tuple[int, int]]] = {_K.INT8: (80, 99), _K.FP8: (80, 999)}
"""The same for KV types. SM 100 to 119 raise for int8 KV in TensorRT-LLM's `build()`."""

SM_NAMES: Final = {70: "Volta", 75: "Turing", 80: "Ampere", 86: "Ampere", 89: "Ada", 90: "Hopper", 100: "Blackwell",
                   103: "Blackwell Ultra", 120: "Blackwell"}  # fmt: skip
