"""What a target or a GPU refuses of a spec, by name, and options that conflict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from enginehouse_builders.spec.model import (
    ComputeType,
    KvType,
    SourceFormat,
    SpeculationMethod,
    WeightQuantization,
)
from enginehouse_builders.spec.problems import Problem
from enginehouse_builders.spec.support import INSTEAD, KV_SM, OLDEST_GPU_SM, SM_NAMES, SUPPORT, WEIGHTS_SM
from enginehouse_contract.errors import refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from enginehouse_builders.spec.model import Spec
    from enginehouse_contract.manifest import Target

_CPU_TOKENS_PER_BLOCK: Final = 32
_CPU_ONLY_ONE: Final = "is 1 on a CPU: its engine is one process"
_NEEDS_PLAIN_WEIGHTS: Final = (WeightQuantization.INT4_AWQ, WeightQuantization.INT4_GPTQ)
_ENGINE_DRAFTS: Final = (SpeculationMethod.DRAFT_TARGET, SpeculationMethod.LOOKAHEAD, SpeculationMethod.MEDUSA)


def refusals(spec: Spec, source: SourceFormat | None = None) -> list[Problem]:
    """Return all that the spec's targets refuse, and its conflicts; *source* is the format that the files have.

    ``auto`` and what is left out is never refused. Devices are another question: :func:`device_refusals`.
    """
    found = [problem for target in spec.targets for problem in _target_refusals(spec, target, source)]
    found += _conflicts(spec)
    return list(dict.fromkeys(found))


def device_refusals(spec: Spec, target: Target, sm: int, device: str) -> list[Problem]:
    """Return what a GPU of architecture *sm* (compute capability without its dot, 90 for Hopper) refuses."""
    generation = f"`{device}` (SM {sm}{', ' + SM_NAMES[sm] if sm in SM_NAMES else ''})"
    if target == "cpu":
        return [Problem("device", f"`{device}` is a GPU; the target `cpu` runs on the device `cpu`.")]
    if sm < OLDEST_GPU_SM:
        hint = "Take a newer GPU."
        problem = f"{generation} is older than TensorRT-LLM supports (SM {OLDEST_GPU_SM}, Ampere). {hint}"
        return [Problem("device", problem)]
    found = []
    weights, kv = spec.quantization.weights, spec.kv_cache.dtype
    if weights in WEIGHTS_SM and not _covers(WEIGHTS_SM[weights], sm):
        takes = [method.value for method in SUPPORT[target].weights if _covers(WEIGHTS_SM.get(method, (0, 999)), sm)]
        message = (
            f"`quantization.weights`: {generation} has no kernels for `{weights.value}`; it takes {', '.join(takes)}."
        )
        found.append(Problem("quantization.weights", message))
    if kv in KV_SM and not _covers(KV_SM[kv], sm):
        takes = [one.value for one in SUPPORT[target].kv if _covers(KV_SM.get(one, (0, 999)), sm)]
        message = f"`kv_cache.dtype`: {generation} has no kernels for `{kv.value}`; it takes {', '.join(takes)}."
        found.append(Problem("kv_cache.dtype", message))
    return found


def _covers(bounds: tuple[int, int], sm: int) -> bool:
    return bounds[0] <= sm <= bounds[1]


def _target_refusals(spec: Spec, target: Target, source: SourceFormat | None) -> Iterator[Problem]:
    support = SUPPORT[target]
    source = source if source is not None else spec.model.format
    if source is not SourceFormat.AUTO:
        yield from _not_taken("model.source", target, source.value, (one.value for one in support.sources))
    if spec.dtype is not ComputeType.AUTO:
        yield from _not_taken("dtype", target, spec.dtype.value, (one.value for one in support.dtypes))
    if spec.quantization.weights is not None:
        given = spec.quantization.weights.value
        yield from _not_taken("quantization.weights", target, given, (one.value for one in support.weights))
    if spec.kv_cache.dtype is not KvType.AUTO:
        given = spec.kv_cache.dtype.value
        yield from _not_taken("kv_cache.dtype", target, given, (one.value for one in support.kv))
    given = spec.speculation.method.value
    yield from _not_taken("speculation.method", target, given, (one.value for one in support.speculation))
    if target == "cpu":
        yield from _cpu_refusals(spec, source)
        return
    floats = {KvType.F32, KvType.F16, KvType.BF16}
    kv, dtype = spec.kv_cache.dtype, spec.dtype
    if kv in floats and dtype is not ComputeType.AUTO and kv.value != dtype.value:
        problem = "must be the compute type where it is not smaller than it"
        yield Problem("kv_cache.dtype", refusal("kv_cache.dtype", problem, limit=dtype.value, given=kv.value))
    if target == "tensorrt_llm":
        yield from _engine_refusals(spec)
    elif (beams := spec.limits.max_beam_width) != 1:
        problem = "is 1 for the target `tensorrt_llm_pytorch`"
        hint = "Beam search needs the target `tensorrt_llm`."
        yield Problem("limits.max_beam_width", refusal("limits.max_beam_width", problem, given=beams, hint=hint))


def _not_taken(field: str, target: Target, given: str, takes: Iterable[str]) -> Iterator[Problem]:
    known = list(takes)
    if given not in known:
        hint = INSTEAD.get((target, given), "")
        problem = f"is not taken by the target `{target}`, which takes {', '.join(known)}"
        yield Problem(field, refusal(field, problem, given=given, hint=hint))


def _cpu_refusals(spec: Spec, source: SourceFormat) -> Iterator[Problem]:
    for name in ("tensor", "pipeline", "expert"):
        if (given := getattr(spec.parallelism, name)) != 1:
            yield Problem(f"parallelism.{name}", refusal(f"parallelism.{name}", _CPU_ONLY_ONE, given=given))
    if (beams := spec.limits.max_beam_width) != 1:
        problem = "is 1 on a CPU: its engine has no beam search"
        yield Problem("limits.max_beam_width", refusal("limits.max_beam_width", problem, given=beams))
    if (block := spec.kv_cache.tokens_per_block) not in {None, _CPU_TOKENS_PER_BLOCK}:
        problem = f"is {_CPU_TOKENS_PER_BLOCK} on a CPU, fixed by OpenVINO's kernels"
        yield Problem("kv_cache.tokens_per_block", refusal("kv_cache.tokens_per_block", problem, given=block))
    if (offload := spec.kv_cache.host_offload_bytes) != 0:
        problem = "means nothing on a CPU, whose KV cache is in host memory"
        yield Problem("kv_cache.host_offload_bytes", refusal("kv_cache.host_offload_bytes", problem, given=offload))
    if spec.lora is not None:
        yield Problem(
            "lora", "`lora` is not offered by the CPU engine; remove it, or merge the adapter into the model."
        )
    weights = spec.quantization.weights
    if weights in _NEEDS_PLAIN_WEIGHTS and source is SourceFormat.GGUF:
        problem = "needs the unquantized Hugging Face folder, not a GGUF file"
        yield Problem("quantization.weights", refusal("quantization.weights", problem, given=weights.value))


def _engine_refusals(spec: Spec) -> Iterator[Problem]:
    """TensorRT-LLM's `build()`: int8 KV turns the paged context attention off, and fp8 KV does without fp8 weights."""
    kv, method = spec.kv_cache.dtype, spec.speculation.method
    quantized = {WeightQuantization.FP8, WeightQuantization.NVFP4, WeightQuantization.AS_IN_FILE}
    loses_paging = kv is KvType.INT8 or (kv is KvType.FP8 and spec.quantization.weights not in quantized)
    if loses_paging:
        why = f"the engine has no paged context attention with `{kv.value}` KV"
        why += "" if kv is KvType.INT8 else " unless weights are `fp8` or `nvfp4`"
        for field, is_on in (
            ("kv_cache.reuse", spec.kv_cache.reuse),
            ("scheduling.chunked_context", spec.scheduling.chunked_context),
        ):
            if is_on:
                yield Problem(
                    field, f"`{field}` conflicts with `kv_cache.dtype`: {why}. Set it to false, or change the KV type."
                )
        if method is SpeculationMethod.DRAFT_TARGET:
            yield Problem(
                "speculation.method", f"`speculation.method` `draft_target` conflicts with `kv_cache.dtype`: {why}."
            )
    elif method is SpeculationMethod.DRAFT_TARGET and not spec.kv_cache.reuse:
        message = "`kv_cache.reuse` must be true for `draft_target`: each round continues from cached blocks."
        yield Problem("kv_cache.reuse", message)
    if method in _ENGINE_DRAFTS and spec.limits.max_beam_width > 1:
        message = "`limits.max_beam_width` over 1 conflicts with speculation: drafts are checked for one beam."
        yield Problem("limits.max_beam_width", message)
    if (block := spec.kv_cache.tokens_per_block) is not None and block & (block - 1):
        problem = "must be a power of two"
        yield Problem("kv_cache.tokens_per_block", refusal("kv_cache.tokens_per_block", problem, given=block))


def _conflicts(spec: Spec) -> Iterator[Problem]:
    limits, weights = spec.limits, spec.quantization.weights
    grouped = {WeightQuantization.INT4, WeightQuantization.INT4_AWQ, WeightQuantization.INT4_GPTQ}
    if spec.quantization.group_size is not None and weights not in grouped:
        name = weights.value if weights else "as the file has them"
        message = f"`quantization.group_size` is for int4 weights, and weights are `{name}`; remove it."
        yield Problem("quantization.group_size", message)
    if limits.max_num_tokens is not None and limits.max_num_tokens < limits.max_batch_size * limits.max_beam_width:
        problem = "is less than one token for each sequence of a full batch"
        least = limits.max_batch_size * limits.max_beam_width
        hint = "Raise it, or lower `limits.max_batch_size`."
        given = limits.max_num_tokens
        text = refusal("limits.max_num_tokens", problem, limit=f"at least {least}", given=given, hint=hint)
        yield Problem("limits.max_num_tokens", text)
    longest = limits.max_input_len or (limits.max_seq_len - 1 if limits.max_seq_len else None)
    if not spec.scheduling.chunked_context and longest and limits.max_num_tokens and longest > limits.max_num_tokens:
        problem = "is longer than one step, and `scheduling.chunked_context` is false"
        hint = "Turn it on, raise `limits.max_num_tokens`, or lower the limit of prompts."
        text = refusal("limits.max_input_len", problem, limit=limits.max_num_tokens, given=longest, hint=hint)
        yield Problem("limits.max_input_len", text)
    if spec.kv_cache.host_offload_bytes and not spec.kv_cache.reuse:
        message = (
            "`kv_cache.host_offload_bytes` needs `kv_cache.reuse`: only blocks kept for reuse are moved to the host."
        )
        yield Problem("kv_cache.host_offload_bytes", message)
    if spec.lora is not None and not spec.lora.adapters:
        yield Problem("lora.adapters", "`lora.adapters` is empty; name the folders of adapters, or remove `lora`.")
