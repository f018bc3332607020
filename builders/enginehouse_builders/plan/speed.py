"""Rates from a roofline: each step takes the longer of its products and its reads, plus what ranks tell each other.

Efficiencies are of peaks, fitted once to NVIDIA's published throughput (TensorRT-LLM's performance overview, releases
0.17 and 1.2); the tests hold each of 68 published figures to within a factor of 1.5. A roofline ranks devices and finds
what does not pay; it is no benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from enginehouse_builders.plan.memory import kv_bytes_per_token
from enginehouse_builders.plan.weights import weight_bits, weights_bytes_per_rank
from enginehouse_builders.spec.model import WeightQuantization

if TYPE_CHECKING:
    from enginehouse_builders.plan.devices import Device
    from enginehouse_builders.plan.memory import MemoryPlan
    from enginehouse_builders.plan.request import MemoryRequest
    from enginehouse_builders.plan.shape import ModelShape

_COMPUTE_EFFICIENCY: Final = 0.55
_BANDWIDTH_EFFICIENCY: Final = 0.6
_LAYER_OVERHEAD_S: Final = 50e-6  # of a GPU's step: launches and small kernels of one layer
_ALL_REDUCE_S: Final = 10e-6
_ALL_REDUCES_PER_LAYER: Final = 2
_CPU_COMPUTE_EFFICIENCY: Final = 0.8
_CPU_BANDWIDTH_EFFICIENCY: Final = 0.9
_CPU_UNPACK_SHARE: Final = 0.15  # quantized values unpacked per second, over operations per second
_UNPACKED_BITS: Final = 16.0  # from here on values are read as they are
_CPU_LAYER_OVERHEAD_S: Final = 50e-6
_ATTENTION_FLOPS: Final = 4  # per query head, head value and position: scores and weighted sum


@dataclass(frozen=True, slots=True)
class Workload:
    """Mean tokens of a prompt and of an answer; ``num_sequences`` at a time, None: as many as fit."""

    num_input_tokens: int = 1000
    num_output_tokens: int = 1000
    num_sequences: int | None = None


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """Rates of one replica (all its ranks together)."""

    num_sequences: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # all sequences together, while nothing is prefilled
    decode_step_s: float  # the time between two tokens of one sequence
    output_tokens_per_s: float  # under steady load, prefill included
    single_tokens_per_s: float  # one sequence alone
    ttft_s: float  # of a prompt that need not wait
    decode_bound_by: str  # "memory" or "compute"


def plan_speed(
    shape: ModelShape, request: MemoryRequest, memory: MemoryPlan, device: Device, workload: Workload
) -> SpeedPlan:
    """Return the rates at *workload*, with as many sequences as fit, are allowed and are wanted."""
    roofline = Roofline(shape, request, device)
    context = workload.num_input_tokens + workload.num_output_tokens / 2
    fit = memory.num_sequences_of(max(int(context), 1))
    wanted = workload.num_sequences or request.max_batch_size
    num_sequences = max(min(fit, wanted, request.max_batch_size), 1)
    step_s = roofline.step_s(num_sequences, context)
    prefill_s = roofline.prefill_s(workload.num_input_tokens)
    per_request_s = prefill_s + workload.num_output_tokens * step_s / num_sequences
    return SpeedPlan(
        num_sequences=num_sequences,
        prefill_tokens_per_s=workload.num_input_tokens / prefill_s,
        decode_tokens_per_s=num_sequences / step_s,
        decode_step_s=step_s,
        output_tokens_per_s=workload.num_output_tokens / per_request_s,
        single_tokens_per_s=1 / roofline.step_s(1, context),
        ttft_s=prefill_s + step_s,
        decode_bound_by=roofline.bound_by(num_sequences, context),
    )


class Roofline:
    """Times of steps of one model on one device (and its like, where the model is spread)."""

    def __init__(self, shape: ModelShape, request: MemoryRequest, device: Device) -> None:
        self._shape, self._request, self._device = shape, request, device
        self._tensor = request.parallelism.tensor
        is_cpu = device.is_cpu
        self._flops = _peak(request, device) * (_CPU_COMPUTE_EFFICIENCY if is_cpu else _COMPUTE_EFFICIENCY)
        self._attention_flops = device.f16_flops * (_CPU_COMPUTE_EFFICIENCY if is_cpu else _COMPUTE_EFFICIENCY)
        self._bandwidth = device.bytes_per_s * (_CPU_BANDWIDTH_EFFICIENCY if is_cpu else _BANDWIDTH_EFFICIENCY)
        self._overhead_s = shape.num_layers * (_CPU_LAYER_OVERHEAD_S if is_cpu else _LAYER_OVERHEAD_S)

    def step_s(self, num_sequences: int, context: float) -> float:
        """Return the seconds of a step that adds one token to each of *num_sequences* at *context* tokens."""
        products_s, reads_s = self._products_s(num_sequences, context), self._reads_s(num_sequences, context)
        # a GPU reads while it computes; a CPU's threads do one after the other
        both_s = products_s + reads_s if self._device.is_cpu else max(products_s, reads_s)
        return both_s + self._overhead_s + self._links_s(num_sequences)

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds that a prompt costs in steps filled with prompts: its share of their time."""
        num_tokens = max(num_tokens, 1)
        filled = max(self._request.max_num_tokens / num_tokens, 1.0)  # prompts that share the step's fixed costs
        reads_s = self._reads_s(0, 0.0) / filled
        products_s = self._products_s(num_tokens, num_tokens / 2, num_head_rows=1)
        return max(products_s, reads_s) + self._overhead_s / filled + self._links_s(num_tokens)

    def bound_by(self, num_sequences: int, context: float) -> str:
        """Return what a decode step waits for."""
        is_memory = self._reads_s(num_sequences, context) >= self._products_s(num_sequences, context)
        return "memory" if is_memory else "compute"

    def _products_s(self, num_tokens: float, context: float, num_head_rows: float | None = None) -> float:
        """Products with the matrices, and attention; the head for as many rows as are sampled (by default all)."""
        shape = self._shape
        num_head_rows = num_tokens if num_head_rows is None else num_head_rows
        attention = _ATTENTION_FLOPS * shape.num_layers * shape.num_heads * shape.head_size * context
        matrices = shape.active_layers_params * num_tokens + shape.embedding_params * num_head_rows
        return (2 * matrices / self._flops + attention * num_tokens / self._attention_flops) / self._tensor

    def _reads_s(self, num_sequences: int, context: float) -> float:
        """Weights once (of a mixture, those that this many tokens can meet), and each sequence's cache."""
        shape, request = self._shape, self._request
        touched = self._touched(num_sequences)
        weights_s = sum(weights_bytes_per_rank(shape, request)) * touched / self._bandwidth
        if self._device.is_cpu and weight_bits(shape, request)[0] < _UNPACKED_BITS:
            weights_s = max(weights_s, shape.num_params * touched / (self._device.f16_flops * _CPU_UNPACK_SHARE))
        cache = num_sequences * context * kv_bytes_per_token(shape, request) * request.parallelism.pipeline
        return weights_s + cache / self._bandwidth

    def _touched(self, num_tokens: int) -> float:
        """Share of the weights that *num_tokens* meet: of k experts of n each, 1 - (1 - k/n)^tokens are met by some."""
        shape = self._shape
        if shape.experts is None or num_tokens < 1:
            return 1.0
        experts = shape.num_moe_layers * shape.experts.num_experts * shape.expert_params
        missed = (1 - shape.experts.num_per_token / shape.experts.num_experts) ** num_tokens
        return 1 - missed * experts / shape.num_params

    def _links_s(self, num_tokens: int) -> float:
        if self._tensor == 1 or not self._device.links_bytes_per_s:
            return 0.0
        share = 2 * (self._tensor - 1) / self._tensor
        moved = share * num_tokens * self._shape.hidden_size * 2 / self._device.links_bytes_per_s
        return _ALL_REDUCES_PER_LAYER * self._shape.num_layers * (moved + _ALL_REDUCE_S)


def _peak(request: MemoryRequest, device: Device) -> float:
    """Operations per second of the type that products are computed in; weight-only methods compute in 16 bits."""
    peaks = {
        WeightQuantization.FP8: device.fp8_flops,
        WeightQuantization.INT8_SMOOTHQUANT: device.int8_ops,
        WeightQuantization.NVFP4: device.fp4_flops,
    }
    peak = peaks.get(request.weights) or device.f16_flops
    return peak / 2 if request.dtype.value == "f32" and not device.is_cpu else peak
