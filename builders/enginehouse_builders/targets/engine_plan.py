"""From a spec to the arguments of TensorRT-LLM 1.2.1: conversion or quantization, `trtllm-build`, and serving.

Names, types and defaults are those recorded in ``tests/data/tensorrt_llm_1_2_1.json``. What a target as a whole refuses
is said in :mod:`enginehouse_builders.spec.compatibility`; here are refusals that need the model's own files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.spec.model import ComputeType, KvType, SourceFormat, SpeculationMethod, WeightQuantization
from enginehouse_builders.targets.emitted import (
    SERVING_FILE,
    TRITON_MODEL,
    TargetPlan,
    resolve_limits,
)
from enginehouse_builders.targets.engine_flags import (
    lora_flags,
    memory_flags,
    serving_parameters,
    speculation_flags,
)
from enginehouse_builders.targets.medusa import read_medusa_heads
from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.model_config import make_config
from enginehouse_contract.tensors import TENSORRT_LLM

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
        **memory_flags(spec, kv, weights),
        **speculation_flags(spec),
        **lora_flags(spec),
    }
    settings = {
        "dtype": dtype,
        "parallelism": _mapping(spec),
        "conversion": conversion,
        "build_flags": flags,
        "num_lora_adapters": len(spec.lora.adapters) if spec.lora else 0,
    }
    serving = serving_parameters(spec, medusa)
    return TargetPlan(
        target="tensorrt_llm",
        settings=settings,
        fragments={"CONVERSION": fragment},
        limits=limits,
        weight_precision=weights.value,
        kv_precision=kv or dtype,
        serving=serving,
        files={
            SERVING_FILE: json.dumps(serving, indent=2, sort_keys=True) + "\n",
            f"{TRITON_MODEL}/config.pbtxt": make_config(TENSORRT_LLM.name, serving).render(),
        },
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
