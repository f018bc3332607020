"""From a spec to the arguments of TensorRT-LLM 1.2.1: conversion or quantization, `trtllm-build`, and serving.

Names, types and defaults are those recorded in ``tests/data/tensorrt_llm_1_2_1.json``. What a target as a whole refuses
is said in :mod:`enginehouse_builders.spec.compatibility`; here are refusals that need the model's own files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.spec.model import ComputeType, KvType, SourceFormat, SpeculationMethod, WeightQuantization
from enginehouse_builders.targets.emitted import DEFAULT_TOKENS_PER_BLOCK, TargetPlan, resolve_limits
from enginehouse_builders.targets.medusa import medusa_choices, read_medusa_heads
from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from enginehouse_builders.spec.model import Spec
    from enginehouse_builders.targets.source import Source

_W = WeightQuantization
_DTYPES: Final = {ComputeType.F32: "float32", ComputeType.F16: "float16", ComputeType.BF16: "bfloat16"}
_KV_COMPUTE: Final = {KvType.F32: "float32", KvType.F16: "float16", KvType.BF16: "bfloat16"}
_CALIBRATED: Final = {_W.FP8: "fp8", _W.NVFP4: "nvfp4", _W.INT4_AWQ: "int4_awq", _W.INT8_SMOOTHQUANT: "int8_sq"}
_WEIGHT_ONLY: Final = {_W.NONE: "full_prec", _W.INT8: "int8_wo", _W.INT4: "int4_wo"}
_WEIGHT_ONLY_ALGOS: Final = {_W.INT8: "W8A16", _W.INT4: "W4A16"}
_GROUPED_FAMILY: Final = ("LlamaForCausalLM", "MistralForCausalLM")  # whose converter reads GPTQ and AWQ files
_AWQ_GROUP_SIZE: Final = 128
_DEFAULT_LORA_TASKS: Final = 8
_LOOKAHEAD_WINDOW_SIZE: Final = 4  # LookaheadDecodingConfig's defaults
_LOOKAHEAD_VERIFICATION_SET_SIZE: Final = 4


def plan_engine(spec: Spec, source: Source) -> TargetPlan:
    """Return all arguments of the engine that *spec* asks for, from the model in *source*.

    Raises :class:`ConfigurationError` naming the field when TensorRT-LLM 1.2.1 cannot make it from these files.
    """
    weights = _weights(spec, source)
    dtype = _DTYPES.get(spec.dtype, source.dtype)
    kv = _kv_algorithm(spec, dtype)
    folders = {"--model": source.path}
    medusa = None
    if spec.speculation.method is SpeculationMethod.MEDUSA and spec.speculation.draft_model:
        folders["--medusa"] = Path(spec.speculation.draft_model)
        medusa = read_medusa_heads(folders["--medusa"])
    for index, adapter in enumerate(spec.lora.adapters if spec.lora else ()):
        folders[f"--lora-{index}"] = Path(adapter)

    fragment, conversion = _conversion(spec, source, weights, dtype, kv, medusa)
    limits = resolve_limits(spec, source)
    flags = {
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "max_beam_width": spec.limits.max_beam_width,
        **_memory_flags(spec, kv, weights),
        **_speculation_flags(spec),
        **_lora_flags(spec),
    }
    settings = {
        "dtype": dtype,
        "parallelism": _mapping(spec),
        "conversion": conversion,
        "build_flags": flags,
        "num_lora_adapters": len(spec.lora.adapters) if spec.lora else 0,
    }
    return TargetPlan(
        target="tensorrt_llm",
        settings=settings,
        fragments={"CONVERSION": fragment},
        limits=limits,
        weight_precision=weights.value,
        kv_precision=kv or dtype,
        serving=_serving(spec, medusa),
        needs_calibration=fragment == "quantize.py.txt" and (weights in _CALIBRATED or kv is not None),
        packages=("nvidia-modelopt",) if fragment == "quantize.py.txt" else (),
        folders=folders,
    )


def _weights(spec: Spec, source: Source) -> WeightQuantization:
    """What the weights become; a folder that is quantized already stays as it is, and only that can be asked of it."""
    asked = spec.quantization.weights
    stored = _W(source.stored) if source.stored else _W.NONE
    if asked in {None, _W.AS_IN_FILE, stored}:
        asked = stored
    elif stored is not _W.NONE:
        problem = "cannot be made of weights that are quantized already"
        hint = "Give the unquantized model, or take `as_in_file`."
        raise ConfigurationError(
            refusal("quantization.weights", problem, limit=stored.value, given=asked.value, hint=hint)
        )
    if source.format is SourceFormat.TENSORRT_LLM_CHECKPOINT:
        _check_checkpoint(spec, source, asked)
        return asked
    if asked is _W.INT4_GPTQ and stored is not _W.INT4_GPTQ:
        hint = "Quantize it with GPTQ first and give that folder, or take `int4_awq`."
        problem = "needs a folder of GPTQ weights: TensorRT-LLM reads them and makes none"
        raise ConfigurationError(refusal("quantization.weights", problem, given=asked.value, hint=hint))
    if source.stored_by and source.stored_by not in {"gptq", "autoawq"}:
        problem = "has weights that TensorRT-LLM's engine converter does not read"
        hint = "Use the target `tensorrt_llm_pytorch`, or give the unquantized model."
        raise ConfigurationError(refusal("model.source", problem, limit="gptq, awq", given=source.stored_by, hint=hint))
    if source.stored and source.architecture not in _GROUPED_FAMILY:
        problem = f"is of {source.stored_by} weights, which the engine converter reads for some architectures only"
        raise ConfigurationError(
            refusal("model.source", problem, limit=", ".join(_GROUPED_FAMILY), given=source.architecture)
        )
    if spec.quantization.group_size and asked is _W.INT4:
        problem = "means nothing to TensorRT-LLM's int4 weights, which have one scale per channel"
        hint = "Remove it, or take `int4_awq`."
        raise ConfigurationError(
            refusal("quantization.group_size", problem, given=spec.quantization.group_size, hint=hint)
        )
    return asked


def _check_checkpoint(spec: Spec, source: Source, asked: WeightQuantization) -> None:
    """A checkpoint is converted already, for a number of ranks: it is built as it is."""
    if asked.value != (source.stored or "none"):
        problem = "cannot be changed: a TensorRT-LLM checkpoint is quantized already, or has lost what it needs"
        raise ConfigurationError(
            refusal("quantization.weights", problem, limit=source.stored or "none", given=asked.value)
        )
    for field, has in (("tensor", source.tensor_parallel), ("pipeline", source.pipeline_parallel)):
        if (given := getattr(spec.parallelism, field)) != has:
            problem = "is not what the checkpoint was converted for"
            raise ConfigurationError(refusal(f"parallelism.{field}", problem, limit=has, given=given))
    if spec.speculation.method is SpeculationMethod.MEDUSA and source.architecture != "MedusaForCausalLm":
        problem = "needs a checkpoint of a Medusa model, or a Hugging Face folder and heads"
        raise ConfigurationError(refusal("speculation.method", problem, given=source.architecture))
    if spec.kv_cache.dtype in {KvType.FP8, KvType.INT8}:
        problem = "is decided by a TensorRT-LLM checkpoint, which holds the scales"
        raise ConfigurationError(refusal("kv_cache.dtype", problem, given=spec.kv_cache.dtype.value))


def _kv_algorithm(spec: Spec, dtype: str) -> str | None:
    """``fp8`` or ``int8``; None keeps keys and values in the compute type, the only other that an engine has."""
    kv = spec.kv_cache.dtype
    if kv in _KV_COMPUTE and _KV_COMPUTE[kv] != dtype:
        problem = "is another than the compute type; an engine has that, `fp8` or `int8`"
        raise ConfigurationError(refusal("kv_cache.dtype", problem, limit=dtype, given=kv.value))
    return kv.value if kv in {KvType.FP8, KvType.INT8} else None


def _mapping(spec: Spec) -> dict[str, int]:
    """The arguments of ``Mapping``, less the rank."""
    tensor, expert = spec.parallelism.tensor, spec.parallelism.expert
    mapping = {"world_size": spec.parallelism.world_size, "tp_size": tensor, "pp_size": spec.parallelism.pipeline}
    return {**mapping, "moe_tp_size": tensor // expert, "moe_ep_size": expert} if expert > 1 else mapping


def _conversion(
    spec: Spec,
    source: Source,
    weights: WeightQuantization,
    dtype: str,
    kv: str | None,
    medusa: tuple[int, int] | None,
) -> tuple[str, dict[str, Any]]:
    """The part of the script that makes a checkpoint, and its arguments."""
    if source.format is SourceFormat.TENSORRT_LLM_CHECKPOINT:
        return "as_is.py.txt", {}
    if not kv and medusa is None and (weights in {_W.NONE, *_WEIGHT_ONLY_ALGOS} or source.stored):
        return "convert.py.txt", _convert_arguments(source, weights)
    if source.stored:
        what = "kv_cache.dtype" if kv else "speculation.method"
        problem = "needs calibration, which weights that are quantized already cannot go through"
        given = kv or "medusa"
        raise ConfigurationError(refusal(what, problem, given=given, hint="Give the unquantized model."))
    if spec.parallelism.expert > 1:
        problem = "is not taken by the quantizer of TensorRT-LLM 1.2.1"
        raise ConfigurationError(refusal("parallelism.expert", problem, limit=1, given=spec.parallelism.expert))
    calibration = spec.quantization.calibration
    arguments: dict[str, Any] = {
        "device": "cuda",
        "dtype": dtype,
        "qformat": _CALIBRATED.get(weights) or _WEIGHT_ONLY[weights],
        "kv_cache_dtype": kv,
        "calib_size": calibration.num_samples,
        "batch_size": 1,
        "calib_max_seq_length": calibration.max_sample_tokens,
        "awq_block_size": spec.quantization.group_size or _AWQ_GROUP_SIZE,
        "tp_size": spec.parallelism.tensor,
        "pp_size": spec.parallelism.pipeline,
        "cp_size": 1,
        "seed": 1234,
        "tokenizer_max_seq_length": 2048,
    }
    if medusa is not None:
        heads, layers = medusa
        arguments |= {
            "num_medusa_heads": heads,
            "num_medusa_layers": layers,
            "max_draft_len": spec.speculation.num_draft_tokens,
            "medusa_hidden_act": "silu",
            "quant_medusa_head": False,
        }
    return "quantize.py.txt", arguments


def _convert_arguments(source: Source, weights: WeightQuantization) -> dict[str, Any]:
    """``quant_config`` and further keywords of ``from_hugging_face``."""
    if source.stored:  # GPTQ, or AWQ in the files of AutoAWQ, which TensorRT-LLM reads into its GPTQ layout
        return {
            "quant_algo": "W4A16_GPTQ",
            "quant_config": {"group_size": source.group_size or _AWQ_GROUP_SIZE, "has_zero_point": True},
            "reads_quantized_weights": True,
            "use_autoawq": source.stored_by == "autoawq",
        }
    return {"quant_algo": _WEIGHT_ONLY_ALGOS.get(weights), "quant_config": {}}


def _memory_flags(spec: Spec, kv: str | None, weights: WeightQuantization) -> dict[str, Any]:
    """Flags of `trtllm-build`, without their dashes."""
    loses_paging = kv == "int8" or (kv == "fp8" and weights not in {_W.FP8, _W.NVFP4})
    return {
        "kv_cache_type": "paged",
        "tokens_per_block": spec.kv_cache.tokens_per_block or DEFAULT_TOKENS_PER_BLOCK,
        "remove_input_padding": "enable",
        "context_fmha": "enable",
        "use_paged_context_fmha": "disable" if loses_paging else "enable",
        "gemm_plugin": "nvfp4" if weights is _W.NVFP4 else "auto",
        "workers": spec.parallelism.world_size,
    }


def _speculation_flags(spec: Spec) -> dict[str, Any]:
    method, num_draft = spec.speculation.method, spec.speculation.num_draft_tokens
    if method is SpeculationMethod.NONE:
        return {}
    modes = {
        SpeculationMethod.DRAFT_TARGET: ("draft_tokens_external", num_draft),
        SpeculationMethod.MEDUSA: ("medusa", num_draft),
        SpeculationMethod.LOOKAHEAD: ("lookahead_decoding", _lookahead_draft_len(num_draft)),
    }
    if method not in modes:
        problem = "is not offered by TensorRT-LLM engines"
        takes = ", ".join(one.value for one in modes)
        hint = "Use the target `tensorrt_llm_pytorch`."
        raise ConfigurationError(refusal("speculation.method", problem, limit=takes, given=method.value, hint=hint))
    mode, max_draft_len = modes[method]
    return {"speculative_decoding_mode": mode, "max_draft_len": max_draft_len}


def _lookahead_draft_len(num_draft_tokens: int) -> int:
    """Draft tokens of one step with n-grams of ``num_draft_tokens + 1``.

    TensorRT-LLM's ``LookaheadDecodingConfig.calculate_speculative_resource``:
    (N - 2) + (W - 1 + G) (N - 1), with window W, n-gram N and verification set G; its documentation's example is
    W = N = G = 7, 83.
    """
    ngram = num_draft_tokens + 1
    return (ngram - 2) + (_LOOKAHEAD_WINDOW_SIZE - 1 + _LOOKAHEAD_VERIFICATION_SET_SIZE) * (ngram - 1)


def _lora_flags(spec: Spec) -> dict[str, Any]:
    if spec.lora is None:
        return {}
    return {
        "lora_plugin": "auto",
        "lora_ckpt_source": "hf",
        "lora_target_modules": list(spec.lora.target_modules),
        "max_lora_rank": spec.lora.max_rank,
    }


def _serving(spec: Spec, medusa: tuple[int, int] | None) -> dict[str, str]:
    """Parameters of the Triton model `tensorrt_llm` that the spec decides."""
    parameters = {
        "gpt_model_type": "inflight_fused_batching",
        "batch_scheduler_policy": spec.scheduling.policy.value,
        "kv_cache_free_gpu_mem_fraction": str(spec.kv_cache.memory_fraction),
        "enable_kv_cache_reuse": _flag(spec.kv_cache.reuse),
        "enable_chunked_context": _flag(spec.scheduling.chunked_context),
        "max_beam_width": str(spec.limits.max_beam_width),
    }
    if spec.kv_cache.host_offload_bytes:
        parameters["kv_cache_host_memory_bytes"] = str(spec.kv_cache.host_offload_bytes)
    if spec.lora is not None:
        parameters["lora_cache_max_adapter_size"] = str(spec.lora.max_rank)
        parameters["lora_cache_optimal_adapter_size"] = str(min(spec.lora.max_rank, _DEFAULT_LORA_TASKS))
    if medusa is not None:
        paths = medusa_choices(medusa[0], spec.speculation.num_draft_tokens)
        parameters["decoding_mode"] = "medusa"
        parameters["medusa_choices"] = ",".join("{" + ",".join(map(str, path)) + "}" for path in paths)
    if spec.speculation.method is SpeculationMethod.LOOKAHEAD:
        parameters["decoding_mode"] = "lookahead"
        parameters["lookahead_window_size"] = str(_LOOKAHEAD_WINDOW_SIZE)
        parameters["lookahead_ngram_size"] = str(spec.speculation.num_draft_tokens + 1)
        parameters["lookahead_verification_set_size"] = str(_LOOKAHEAD_VERIFICATION_SET_SIZE)
    return parameters


def _flag(value: bool) -> str:
    return "true" if value else "false"
