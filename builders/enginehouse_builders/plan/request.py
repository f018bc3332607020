"""What decides the bytes of one engine, resolved from a spec: nothing is ``auto`` or left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from enginehouse_builders.spec.model import ComputeType, KvType, WeightQuantization

if TYPE_CHECKING:
    from enginehouse_builders.plan.shape import ModelShape
    from enginehouse_builders.spec.model import Parallelism, Spec
    from enginehouse_contract.manifest import Target

DEFAULT_NUM_TOKENS: Final = {"cpu": 512, "tensorrt_llm": 8192, "tensorrt_llm_pytorch": 8192}
DEFAULT_TOKENS_PER_BLOCK: Final = 32
DEFAULT_GROUP_SIZE: Final = {"cpu": 32, "tensorrt_llm": 128, "tensorrt_llm_pytorch": 128}
CPU_DEFAULT_MAX_SEQ_LEN: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What decides the bytes of one engine, everything resolved: nothing is ``auto`` or ``None``."""

    target: Target
    weights: WeightQuantization
    dtype: ComputeType
    kv: KvType
    group_size: int
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    parallelism: Parallelism
    max_beam_width: int = 1
    tokens_per_block: int = DEFAULT_TOKENS_PER_BLOCK
    kv_fraction: float = 0.9
    draft: ModelShape | None = None
    num_adapters: int = 0
    adapter_rank: int = 0
    num_adapter_modules: int = 0

    def of_draft(self, draft: ModelShape) -> MemoryRequest:
        """What the draft model asks for: its weights stay as its files have them."""
        method = WeightQuantization.AS_IN_FILE if draft.stored else WeightQuantization.NONE
        return replace(self, weights=method, draft=None, num_adapters=0)


def memory_request(spec: Spec, shape: ModelShape, target: Target, draft: ModelShape | None = None) -> MemoryRequest:
    """Resolve everything of *spec* that a target decides by default."""
    dtype = spec.dtype if spec.dtype is not ComputeType.AUTO else ComputeType(shape.dtype)
    weights = spec.quantization.weights
    if weights is None:
        weights = WeightQuantization.AS_IN_FILE if shape.stored else WeightQuantization.NONE
    limits, lora = spec.limits, spec.lora
    window = shape.max_position_embeddings
    default_seq_len = min(window, CPU_DEFAULT_MAX_SEQ_LEN) if target == "cpu" else window
    return MemoryRequest(
        target=target,
        weights=weights,
        dtype=dtype,
        kv=_kv_type(spec.kv_cache.dtype, dtype, target),
        group_size=spec.quantization.group_size or DEFAULT_GROUP_SIZE[target],
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len or default_seq_len,
        max_num_tokens=limits.max_num_tokens or DEFAULT_NUM_TOKENS[target],
        max_beam_width=limits.max_beam_width,
        tokens_per_block=spec.kv_cache.tokens_per_block or DEFAULT_TOKENS_PER_BLOCK,
        kv_fraction=spec.kv_cache.memory_fraction,
        parallelism=spec.parallelism,
        draft=draft,
        num_adapters=len(lora.adapters) if lora else 0,
        adapter_rank=lora.max_rank if lora else 0,
        num_adapter_modules=len(lora.target_modules) if lora else 0,
    )


def _kv_type(kv: KvType, dtype: ComputeType, target: Target) -> KvType:
    if kv is not KvType.AUTO:
        return kv
    return KvType.U8 if target == "cpu" else KvType(dtype.value)
