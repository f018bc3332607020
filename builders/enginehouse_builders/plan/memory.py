"""Bytes: weights per rank, activations, KV cache, and how many sequences fit. Pure functions of a model's shape.

Sources: NVIDIA's description of TensorRT-LLM's memory (``docs/source/legacy/reference/memory.md``) with its worked
example, and aiconfigurator's measured constants (``base_backend.py``, ``trtllm_backend.py``). Tests compare with both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from enginehouse_builders.plan.weights import COMPUTE_BYTES, weights_bytes_per_rank
from enginehouse_builders.spec.model import KvType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from enginehouse_builders.plan.request import MemoryRequest
    from enginehouse_builders.plan.shape import ModelShape

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30

_KV_BYTES: Final = {"u8": 1, "int8": 1, "fp8": 1, "f16": 2, "bf16": 2, "f32": 4}
_CPU_U8_BLOCK: Final = 32  # tokens whose keys share scales, channel by channel, in OpenVINO's u8 cache
_CPU_U8_SCALE_BYTES: Final = 8  # a scale and a zero point in f32


# aiconfigurator, trtllm_backend.py: bytes of activations per token and hidden value, by tensor ranks
_ACTIVATION_FACTORS: Final = {1: 10.0, 2: 6.0, 4: 5.0, 8: 5.0}
_LLAMA_ACTIVATION_FACTORS: Final = {1: 11.0, 2: 6.5, 4: 5.0, 8: 5.0}
_MOE_ACTIVATION_FACTORS: Final = {1: 22.0, 2: 13.0, 4: 10.0, 8: 10.0}
_MIN_ACTIVATIONS_BYTES: Final = 70 * _MIB
_NCCL_BYTES: Final = {1: 0, 2: 358_612_992, 4: 411_041_792, 8: 411_041_792}
_RUNTIME_BYTES: Final = {
    "cpu": 400 * _MIB,  # three Python processes with their libraries
    "tensorrt_llm": 1 * _GIB,  # NVIDIA's worked example: CUDA context, runtime and decoder buffers
    "tensorrt_llm_pytorch": 7 * _GIB // 2,  # aiconfigurator: what PyTorch holds beside the model
}
_CPU_REPACKED_SHARE: Final = 0.5  # of the weights, held twice: compiling repacks some while the file stays mapped


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of the fullest rank, and what fits beside them in ``available_bytes`` of one device."""

    available_bytes: int
    weights_bytes_per_rank: tuple[int, ...]  # by pipeline stage; tensor ranks of a stage are alike
    activations_bytes: int
    runtime_bytes: int  # libraries, communication buffers, adapters
    draft_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int
    tokens_per_block: int
    max_seq_len: int
    max_batch_size: int
    max_beam_width: int

    @property
    def weights_bytes(self) -> int:
        """Weights of the fullest rank."""
        return max(self.weights_bytes_per_rank)

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache."""
        return self.weights_bytes + self.activations_bytes + self.runtime_bytes + self.draft_bytes

    @property
    def kv_bytes_per_sequence(self) -> int:
        """Blocks of one sequence of full length, all its beams."""
        return self.kv_bytes_of(self.max_seq_len)

    @property
    def least_bytes(self) -> int:
        """With room for one sequence of full length."""
        return self.fixed_bytes + self.kv_bytes_per_sequence

    @property
    def num_kv_tokens(self) -> int:
        """Token slots of the pool."""
        return self.kv_pool_bytes // (self.kv_bytes_per_token * self.tokens_per_block) * self.tokens_per_block

    @property
    def num_full_sequences(self) -> int:
        """Sequences of ``max_seq_len`` that the pool holds at a time."""
        return self.num_sequences_of(self.max_seq_len)

    @property
    def fits(self) -> bool:
        """Whether at least one full sequence can be served."""
        return self.num_full_sequences >= 1

    def kv_bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that one sequence of *num_tokens* takes."""
        num_blocks = -(-num_tokens // self.tokens_per_block)
        return num_blocks * self.tokens_per_block * self.kv_bytes_per_token * self.max_beam_width

    def num_sequences_of(self, num_tokens: int) -> int:
        """Return how many sequences of *num_tokens* the pool holds at a time, whatever the batch size allows."""
        return self.kv_pool_bytes // self.kv_bytes_of(num_tokens)


def plan_memory(shape: ModelShape, request: MemoryRequest, available_bytes: int) -> MemoryPlan:
    """Divide *available_bytes* of one device between weights, activations, runtime and KV cache.

    The KV pool takes ``kv_fraction`` of what the rest leaves, as TensorRT-LLM does after loading.
    """
    weights = weights_bytes_per_rank(shape, request)
    activations = activations_bytes(shape, request)
    runtime = _runtime_bytes(shape, request, max(weights))
    draft_bytes, draft_kv = 0, 0
    if request.draft is not None:
        draft_bytes = max(weights_bytes_per_rank(request.draft, request.of_draft(request.draft)))
        draft_kv = kv_bytes_per_token(request.draft, request)
    left = available_bytes - max(weights) - activations - runtime - draft_bytes
    return MemoryPlan(
        available_bytes=available_bytes,
        weights_bytes_per_rank=weights,
        activations_bytes=activations,
        runtime_bytes=runtime,
        draft_bytes=draft_bytes,
        kv_bytes_per_token=kv_bytes_per_token(shape, request) + draft_kv,
        kv_pool_bytes=max(int(left * request.kv_fraction), 0),
        tokens_per_block=request.tokens_per_block,
        max_seq_len=request.max_seq_len,
        max_batch_size=request.max_batch_size,
        max_beam_width=request.max_beam_width,
    )


def activations_bytes(shape: ModelShape, request: MemoryRequest) -> int:
    """Return the bytes of activations of one step of ``max_num_tokens``.

    GPU: ``max(70 MiB, 2 * tokens * hidden * factor)`` (aiconfigurator). CPU: f32 activations of the widest layer, and
    logits of one row per sequence.
    """
    if request.target == "cpu":
        widest = 3 * shape.intermediate_size + 4 * shape.hidden_size
        return 4 * (request.max_num_tokens * widest + request.max_batch_size * shape.vocab_size)
    factors = _ACTIVATION_FACTORS
    if shape.experts is not None:
        factors = _MOE_ACTIVATION_FACTORS
    elif shape.architecture.lower().startswith("llama"):
        factors = _LLAMA_ACTIVATION_FACTORS
    factor = _by_ranks(factors, request.parallelism.tensor)
    return max(_MIN_ACTIVATIONS_BYTES, round(2 * request.max_num_tokens * shape.hidden_size * factor))


def kv_bytes_per_token(shape: ModelShape, request: MemoryRequest) -> int:
    """Return the KV bytes that one token takes on the fullest rank.

    ``2 * layers * ceil(kv_heads / tensor) * head_size * bytes``; latent attention keeps one vector for all heads.
    """
    num_layers = -(-shape.num_layers // request.parallelism.pipeline)
    num_bytes = _KV_BYTES[request.kv.value]
    if shape.latent is not None:
        return num_layers * (shape.latent.kv_rank + shape.latent.rope_head_size) * num_bytes
    num_heads = -(-shape.num_kv_heads // request.parallelism.tensor)
    if request.target == "cpu" and request.kv is KvType.U8:  # scales lie inside the blocks
        key = shape.head_size * (_CPU_U8_BLOCK + _CPU_U8_SCALE_BYTES) // _CPU_U8_BLOCK
        return num_layers * num_heads * (key + shape.head_size + _CPU_U8_SCALE_BYTES)
    return 2 * num_layers * num_heads * shape.head_size * num_bytes


def _runtime_bytes(shape: ModelShape, request: MemoryRequest, weights_bytes: int) -> int:
    tensor = request.parallelism.tensor
    num_bytes = _RUNTIME_BYTES[request.target]
    if request.target == "cpu":
        num_bytes += int(weights_bytes * _CPU_REPACKED_SHARE)
    else:
        num_bytes += int(_by_ranks(_NCCL_BYTES, request.parallelism.world_size))
    two_matrices = 2 * shape.hidden_size * request.adapter_rank * COMPUTE_BYTES[request.dtype.value]
    return num_bytes + request.num_adapters * request.num_adapter_modules * shape.num_layers * two_matrices // tensor


def _by_ranks(table: Mapping[int, float], num_ranks: int) -> float:
    """The entry of the largest number of ranks that is no larger."""
    return table[max(ranks for ranks in table if ranks <= num_ranks)]
