"""The memory gate: do weights, activations and the KV cache of one full sequence fit here, and how many more do.

The plan's formulas over the shape that the build itself records, with the weights as many bytes as its files hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.gates.record import GateResult
from enginehouse_builders.plan.memory import MemoryPlan, plan_memory
from enginehouse_builders.plan.reading import read_shape
from enginehouse_builders.plan.request import DEFAULT_GROUP_SIZE, MemoryRequest
from enginehouse_builders.spec.model import ComputeType, KvType, Parallelism, SourceFormat, WeightQuantization

if TYPE_CHECKING:
    from enginehouse_builders.gates.host import Host
    from enginehouse_builders.gates.record import Value
    from enginehouse_builders.store import StoredBuild

_KV_FRACTION: Final = 0.9  # NVIDIA's default of kv_cache_free_gpu_mem_fraction, and ours


def plan_of(build: StoredBuild, config: dict[str, Any], host: Host) -> MemoryPlan:
    """Plan a finished build on *host*: the fullest rank, in what one device has available.

    Raises :class:`ModelSourceError` when ``config.json`` does not tell the engine's shape.
    """
    manifest, limits = build.manifest, build.manifest.limits
    mapping = config.get("pretrained_config", {}).get("mapping", {})
    tensor = mapping.get("tp_size", mapping.get("world_size", 1))
    parallelism = Parallelism(tensor=tensor, pipeline=mapping.get("pp_size", 1))
    request = MemoryRequest(
        target=manifest.target,
        weights=_weights_of(manifest.weight_precision),
        dtype=ComputeType.F32 if manifest.target == "cpu" else ComputeType.BF16,
        kv=_kv_of(manifest.kv_precision, manifest.target),
        group_size=DEFAULT_GROUP_SIZE[manifest.target],
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        parallelism=parallelism,
        kv_fraction=_KV_FRACTION,
    )
    shape = read_shape(build.build_dir, SourceFormat.TENSORRT_LLM_CHECKPOINT)
    available = available_bytes(host, is_gpu=manifest.target != "cpu")
    files_bytes = sum(record.num_bytes for record in manifest.files.values())
    plan = replace(
        plan_memory(shape, request, available), weights_bytes_per_rank=(files_bytes // parallelism.world_size,)
    )
    return replace(plan, kv_pool_bytes=max(int((available - plan.fixed_bytes) * _KV_FRACTION), 0))


def available_bytes(host: Host, *, is_gpu: bool) -> int:
    """Memory that one rank could have here: the host's, or the smallest GPU's."""
    return min(gpu.memory_bytes for gpu in host.gpus) if is_gpu and host.gpus else host.available_bytes


def memory_gate(plan: MemoryPlan) -> GateResult:
    """Judge whether a build fits."""
    numbers: dict[str, Value] = {
        "weights_bytes": plan.weights_bytes,
        "activations_bytes": plan.activations_bytes,
        "runtime_bytes": plan.runtime_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "least_bytes": plan.least_bytes,
        "num_full_sequences": plan.num_full_sequences,
    }
    thresholds: dict[str, Value] = {"available_bytes": plan.available_bytes, "min_num_full_sequences": 1}
    if plan.fits:
        reason = f"{plan.num_full_sequences} sequences of {plan.max_seq_len} tokens fit"
        return GateResult("memory", "passed", reason, numbers, thresholds)
    reason = (
        f"one sequence of {plan.max_seq_len} tokens does not fit: weights {_mb(plan.weights_bytes)}, activations "
        f"{_mb(plan.activations_bytes)}, runtime {_mb(plan.runtime_bytes)}, KV {_mb(plan.kv_bytes_per_sequence)}, and "
        f"{_mb(plan.available_bytes)} are available; free some, or build with smaller weights, KV or max_seq_len"
    )
    return GateResult("memory", "failed", reason, numbers, thresholds)


def _weights_of(precision: str) -> WeightQuantization:
    """The plan's name of a precision; it decides what compiling holds twice, so a file's own blocks count as 8 bits."""
    if precision in {"f32", "f16", "bf16"}:
        return WeightQuantization.NONE
    known = {method.value for method in WeightQuantization} - {WeightQuantization.AS_IN_FILE.value}
    return WeightQuantization(precision) if precision in known else WeightQuantization.INT8


def _kv_of(precision: str, target: str) -> KvType:
    known = {kv.value for kv in KvType} - {KvType.AUTO.value}
    if precision in known:
        return KvType(precision)
    return KvType.U8 if target == "cpu" else KvType.BF16


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
