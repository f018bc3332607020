"""Known mistakes, each found by computing it and answered by computing what would do better."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from enginehouse_builders.plan.devices import gpu_or_none
from enginehouse_builders.plan.memory import MemoryPlan, plan_memory
from enginehouse_builders.plan.speed import Workload, plan_speed
from enginehouse_builders.plan.weights import weight_bits
from enginehouse_builders.spec.model import KvType, Parallelism, WeightQuantization
from enginehouse_builders.spec.support import KV_SM, SUPPORT, WEIGHTS_SM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from enginehouse_builders.plan.devices import Device
    from enginehouse_builders.plan.request import MemoryRequest
    from enginehouse_builders.plan.shape import ModelShape
    from enginehouse_builders.spec.model import Spec

Severity = Literal["error", "warning", "note"]

_TENSOR_RANKS: Final = (2, 4, 8, 16)
_BATCH_TO_COMPARE: Final = 32
_FAR_OVER_NEED: Final = 4
_PRECISE_FIRST: Final = (
    WeightQuantization.FP8,
    WeightQuantization.INT8,
    WeightQuantization.INT8_SMOOTHQUANT,
    WeightQuantization.INT4_AWQ,
    WeightQuantization.NVFP4,
    WeightQuantization.INT4_GPTQ,
    WeightQuantization.INT4,
)
_FP8_WEIGHTS: Final = frozenset({WeightQuantization.FP8, WeightQuantization.NVFP4, WeightQuantization.AS_IN_FILE})
_SMALL_KV: Final = {"cpu": KvType.U8, "tensorrt_llm": KvType.FP8, "tensorrt_llm_pytorch": KvType.FP8}


@dataclass(frozen=True, slots=True)
class PlanWarning:
    """A known mistake that this plan makes, and what to do about it."""

    code: str
    severity: Severity
    message: str
    advice: str


def warnings_of(
    spec: Spec,
    shape: ModelShape,
    request: MemoryRequest,
    memory: MemoryPlan,
    device: Device,
    workload: Workload,
    *,
    is_cost_known: bool,
) -> tuple[PlanWarning, ...]:
    """Return the known mistakes of a plan, those that keep it from working first."""
    found = [
        *_fit(shape, request, memory, device, workload),
        *_window(shape, request),
        *_architecture(spec, shape, request, device),
        *_draft(shape, request),
        *_kv(memory, request),
        *_need(memory, request, workload),
        *_batch(shape, request, memory, device, workload),
        *_cost(is_cost_known=is_cost_known),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(found, key=lambda warning: order[warning.severity]))


def _fit(
    shape: ModelShape, request: MemoryRequest, memory: MemoryPlan, device: Device, workload: Workload
) -> Iterator[PlanWarning]:
    if memory.fits:
        return
    available = memory.available_bytes
    message = (
        f"it does not fit: one sequence of {request.max_seq_len:,} tokens needs {gb(memory.least_bytes)} (weights "
        f"{gb(memory.weights_bytes + memory.draft_bytes)}, activations {gb(memory.activations_bytes)}, runtime "
        f"{gb(memory.runtime_bytes)}, KV {gb(memory.kv_bytes_per_sequence)}), `{device.name}` has {gb(available)}"
    )
    ways = []
    longest = memory.num_kv_tokens // request.max_beam_width
    if longest >= request.tokens_per_block:
        ways.append(f"set `limits.max_seq_len` to {longest:,} at most")
    ways += _smaller_that_fit(shape, request, memory, device, workload.num_input_tokens + workload.num_output_tokens)
    if not device.is_cpu and (more := _ranks_that_fit(shape, request, available)) is not None:
        ways.append(f"spread it over {more.world_size} GPUs (`parallelism.tensor: {more.tensor}`)")
    if not ways:
        missing = gb(memory.least_bytes - available)
        ways.append(
            f"nothing this device takes makes it fit: offload {missing} to host memory, or take a larger device"
        )
    yield PlanWarning("does_not_fit", "error", message, "; or ".join(ways))


def _smaller_that_fit(
    shape: ModelShape, request: MemoryRequest, memory: MemoryPlan, device: Device, need: int
) -> Iterator[str]:
    """The most precise weights that fit with sequences as long as asked for, and those with as long as needed."""
    enough = _rounded(2 * need)
    found: list[WeightQuantization] = []
    lengths = [request.max_seq_len]
    if memory.num_kv_tokens < enough < request.max_seq_len:
        lengths.append(enough)
    for seq_len in lengths:
        for changed in _smaller(shape, request, device):
            if (
                changed.weights in found
                or not plan_memory(shape, replace(changed, max_seq_len=seq_len), memory.available_bytes).fits
            ):
                continue
            found.append(changed.weights)
            parts = [] if changed.weights is request.weights else [f"`quantization.weights: {changed.weights.value}`"]
            parts += [] if changed.kv is request.kv else [f"`kv_cache.dtype: {changed.kv.value}`"]
            parts += [] if seq_len == request.max_seq_len else [f"`limits.max_seq_len: {seq_len}`"]
            yield f"set {' and '.join(parts)}"
            break


def _smaller(shape: ModelShape, request: MemoryRequest, device: Device) -> Iterator[MemoryRequest]:
    """What the target and the device take that is smaller, the most precise first; none that conflicts."""
    now, _ = weight_bits(shape, request)
    for method in (request.weights, *_PRECISE_FIRST):
        if method is not request.weights and not _takes_weights(method, request, device):
            continue
        for kv in dict.fromkeys((request.kv, _SMALL_KV[request.target])):
            changed = replace(request, weights=method, kv=kv)
            is_smaller = weight_bits(shape, changed)[0] < now if method is not request.weights else kv is not request.kv
            if is_smaller and _takes_kv(changed, device):
                yield changed


def _ranks_that_fit(shape: ModelShape, request: MemoryRequest, available_bytes: int) -> Parallelism | None:
    for tensor in _TENSOR_RANKS:
        if tensor <= request.parallelism.tensor or shape.num_heads % tensor:
            continue
        parallelism = request.parallelism.model_copy(update={"tensor": tensor})
        if plan_memory(shape, replace(request, parallelism=parallelism), available_bytes).fits:
            return parallelism
    return None


def _takes_weights(method: WeightQuantization, request: MemoryRequest, device: Device) -> bool:
    if method not in SUPPORT[request.target].weights:
        return False
    low, high = WEIGHTS_SM.get(method, (0, 999))
    return device.sm is None or low <= device.sm <= high


def _takes_kv(request: MemoryRequest, device: Device) -> bool:
    """Whether the device has kernels for the KV type, and the engine keeps its paged attention with it."""
    low, high = KV_SM.get(request.kv, (0, 999))
    has_kernels = device.sm is None or low <= device.sm <= high
    loses_paging = request.target == "tensorrt_llm" and request.kv is KvType.FP8 and request.weights not in _FP8_WEIGHTS
    return has_kernels and not loses_paging


def _window(shape: ModelShape, request: MemoryRequest) -> Iterator[PlanWarning]:
    if request.max_seq_len > shape.max_position_embeddings:
        yield PlanWarning(
            "max_seq_len_over_window",
            "error",
            f"`limits.max_seq_len` {request.max_seq_len:,} is beyond the {shape.max_position_embeddings:,} tokens that "
            "the model was trained for: answers turn to nonsense there",
            f"set it to {shape.max_position_embeddings:,} at most",
        )


def _architecture(spec: Spec, shape: ModelShape, request: MemoryRequest, device: Device) -> Iterator[PlanWarning]:
    here = f"sm{device.sm}"
    if shape.built_for and device.sm is not None and shape.built_for.lower().replace("_", "") != here:
        yield PlanWarning(
            "other_architecture",
            "error",
            f"this engine was built for {shape.built_for}; `{device.name}` is {here}, which cannot load it",
            f"build it again on `{device.name}`, from the checkpoint",
        )
    if request.target == "tensorrt_llm" and spec.device and spec.device != device.name:
        planned = gpu_or_none(spec.device)
        if planned is not None and planned.sm != device.sm:
            yield PlanWarning(
                "other_architecture",
                "warning",
                f"an engine built on the spec's device `{planned.name}` (SM {planned.sm}) does not load on "
                f"`{device.name}` (SM {device.sm})",
                "build once for each architecture, or use the target tensorrt_llm_pytorch",
            )


def _draft(shape: ModelShape, request: MemoryRequest) -> Iterator[PlanWarning]:
    draft = request.draft
    if draft is None or draft.num_params * 2 < shape.num_params:
        return
    ratio = draft.num_params / shape.num_params
    size = "no smaller than the target" if ratio >= 1 else f"{ratio:.0%} of the target's size"
    yield PlanWarning(
        "draft_larger_than_target",
        "error" if ratio >= 1 else "warning",
        f"the draft model is {size} ({draft.num_params / 1e9:.2f} of {shape.num_params / 1e9:.2f} billion values): "
        "a draft costs as much as the token it saves",
        f"take one of at most {shape.num_params / 10e9:.2g} billion, or `speculation.method: ngram`, without a model",
    )
    if draft.vocab_size != shape.vocab_size:
        yield PlanWarning(
            "draft_of_another_vocabulary",
            "error",
            f"the draft model has {draft.vocab_size:,} tokens, the target {shape.vocab_size:,}",
            "take a draft of the same family",
        )


def _kv(memory: MemoryPlan, request: MemoryRequest) -> Iterator[PlanWarning]:
    wanted = request.max_batch_size * memory.kv_bytes_per_sequence
    if not memory.fits or wanted <= memory.kv_pool_bytes:
        return
    length = memory.num_kv_tokens // request.max_batch_size // request.max_beam_width
    yield PlanWarning(
        "kv_ignored",
        "warning",
        f"{request.max_batch_size} sequences of {request.max_seq_len:,} tokens would take {gb(wanted)} of KV cache, "
        f"and {gb(memory.kv_pool_bytes)} are left: {memory.num_full_sequences} fit at that length",
        f"all {request.max_batch_size} fit while they average under {length:,} tokens; else lower "
        f"`limits.max_batch_size` to {memory.num_full_sequences}, or take a smaller `kv_cache.dtype`",
    )


def _need(memory: MemoryPlan, request: MemoryRequest, workload: Workload) -> Iterator[PlanWarning]:
    need = workload.num_input_tokens + workload.num_output_tokens
    if request.max_seq_len < need:
        yield PlanWarning(
            "max_seq_len_under_need",
            "error",
            f"`limits.max_seq_len` {request.max_seq_len:,} is under the {need:,} tokens of the workload",
            "raise it, or plan for a shorter workload (--input-tokens, --output-tokens)",
        )
    if memory.fits and request.max_seq_len >= _FAR_OVER_NEED * need:
        enough = min(_rounded(2 * need), request.max_seq_len)
        yield PlanWarning(
            "max_seq_len_far_over_need",
            "note",
            f"`limits.max_seq_len` is {request.max_seq_len:,} and the workload's sequences have {need:,} tokens: one "
            f"runaway answer can take the room of {request.max_seq_len // need}",
            f"{enough:,} leaves twice the need or more: {memory.num_sequences_of(enough):,} full sequences fit, not "
            f"{memory.num_full_sequences:,}",
        )


def _batch(
    shape: ModelShape, request: MemoryRequest, memory: MemoryPlan, device: Device, workload: Workload
) -> Iterator[PlanWarning]:
    if request.max_batch_size != 1 or not memory.fits:
        return
    alone = plan_speed(shape, request, memory, device, workload)
    changed = replace(request, max_batch_size=_BATCH_TO_COMPARE)
    together = plan_speed(shape, changed, plan_memory(shape, changed, memory.available_bytes), device, workload)
    ratio = together.output_tokens_per_s / alone.output_tokens_per_s
    yield PlanWarning(
        "batch_of_one",
        "warning",
        f"`limits.max_batch_size` 1 serves one at a time, {alone.output_tokens_per_s:,.0f} tokens/s; others wait",
        f"{together.num_sequences} at a time give {together.output_tokens_per_s:,.0f} tokens/s, so each token costs "
        f"1/{ratio:.1f} of it",
    )


def _cost(*, is_cost_known: bool) -> Iterator[PlanWarning]:
    if not is_cost_known:
        yield PlanWarning(
            "no_cost_tracking",
            "warning",
            "nobody said what this device costs, so the cost of a token is not known",
            'set `costs.machine_hour: "2.50"` in the spec, or give --machine-hour',
        )


def _rounded(num_tokens: int) -> int:
    """Up to whole kilotokens."""
    return -(-num_tokens // 1024) * 1024


def gb(num_bytes: float) -> str:
    """Return bytes for reading: GB (10^9), or MB below one."""
    return f"{num_bytes / 1e9:,.1f} GB" if abs(num_bytes) >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"  # noqa: PLR2004
