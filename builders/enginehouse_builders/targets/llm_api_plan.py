"""From a spec to the arguments of TensorRT-LLM's LLM API (its PyTorch backend), 1.2 and newer: `model.yaml`.

Names, types and defaults are those recorded in ``tests/data/tensorrt_llm_1_2_1.json``; 1.3 takes the same keys.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from enginehouse_builders.spec.model import ComputeType, KvType, SourceFormat, SpeculationMethod, WeightQuantization
from enginehouse_builders.targets.emitted import DEFAULT_TOKENS_PER_BLOCK, TRITON_MODEL, TargetPlan, resolve_limits
from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.model_config import make_config
from enginehouse_contract.tensors import TENSORRT_LLM

if TYPE_CHECKING:
    from enginehouse_builders.spec.model import Spec
    from enginehouse_builders.targets.source import Source

ARGUMENTS_FILE: Final = "model.yaml"
WEIGHTS_FOLDER: Final = "model"
DRAFT_FOLDER: Final = "draft"
_DTYPES: Final = {ComputeType.F16: "float16", ComputeType.BF16: "bfloat16"}
_KV_COMPUTE: Final = {KvType.F16: "float16", KvType.BF16: "bfloat16"}
_MAX_MATCHING_NGRAM_SIZE: Final = 3
_WITHOUT_OVERLAP: Final = (SpeculationMethod.NGRAM, SpeculationMethod.DRAFT_TARGET)


def plan_llm_api(spec: Spec, source: Source) -> TargetPlan:
    """Return the LLM's arguments and the Triton model for *spec*, from the model in *source*.

    Raises :class:`ConfigurationError` naming the field when the LLM API cannot serve it.
    """
    _check(spec, source)
    dtype = _DTYPES.get(spec.dtype, source.dtype)
    kv = _kv_dtype(spec, dtype)
    folders = {"--model": source.path}
    if spec.speculation.draft_model:
        folders["--draft"] = Path(spec.speculation.draft_model)
    for index, adapter in enumerate(spec.lora.adapters if spec.lora else ()):
        folders[f"--lora-{index}"] = Path(adapter)
    arguments = llm_arguments(spec, source, dtype, kv)
    return TargetPlan(
        target="tensorrt_llm_pytorch",
        settings={
            "parallelism": {"world_size": spec.parallelism.world_size},
            "llm_arguments": arguments,
            "num_lora_adapters": len(spec.lora.adapters) if spec.lora else 0,
        },
        fragments={},
        limits=resolve_limits(spec, source),
        weight_precision=source.stored or "none",
        kv_precision=dtype if kv == "auto" else kv,
        serving={},
        files={
            ARGUMENTS_FILE: yaml.safe_dump(arguments, sort_keys=False),
            f"{TRITON_MODEL}/config.pbtxt": _config(spec),
            f"{TRITON_MODEL}/1/model.py": Path(__file__).with_name("llm_api_model.py").read_text(encoding="utf-8"),
        },
        folders=folders,
    )


def llm_arguments(spec: Spec, source: Source, dtype: str, kv: str) -> dict[str, Any]:
    """Return the keywords of ``tensorrt_llm.LLM``, less ``model``; folders are relative to the build."""
    limits, tensor, expert = resolve_limits(spec, source), spec.parallelism.tensor, spec.parallelism.expert
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "skip_tokenizer_init": True,  # requests carry token ids
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": spec.parallelism.pipeline,
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_input_len,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "max_beam_width": 1,
        "enable_chunked_prefill": spec.scheduling.chunked_context,
        "scheduler_config": {"capacity_scheduler_policy": spec.scheduling.policy.value.upper()},
        "kv_cache_config": {
            "dtype": kv,
            "tokens_per_block": spec.kv_cache.tokens_per_block or DEFAULT_TOKENS_PER_BLOCK,
            "free_gpu_memory_fraction": spec.kv_cache.memory_fraction,
            "enable_block_reuse": spec.kv_cache.reuse,
        },
        "cuda_graph_config": {"max_batch_size": limits.max_batch_size, "enable_padding": True},
        "return_perf_metrics": True,
    }
    if spec.kv_cache.host_offload_bytes:
        arguments["kv_cache_config"]["host_cache_size"] = spec.kv_cache.host_offload_bytes
    if expert > 1:
        arguments |= {"moe_expert_parallel_size": expert, "moe_tensor_parallel_size": tensor // expert}
    if spec.speculation.method is not SpeculationMethod.NONE:
        arguments["speculative_config"] = _speculation(spec)
        arguments["disable_overlap_scheduler"] = spec.speculation.method in _WITHOUT_OVERLAP
    if spec.lora is not None:
        arguments["enable_lora"] = True
        arguments["lora_config"] = {
            "lora_dir": [f"lora/{index}" for index in range(len(spec.lora.adapters))],
            "lora_ckpt_source": "hf",
            "max_lora_rank": spec.lora.max_rank,
            "lora_target_modules": list(spec.lora.target_modules),
            "max_loras": len(spec.lora.adapters),
            "max_cpu_loras": len(spec.lora.adapters),
        }
    return arguments


def _speculation(spec: Spec) -> dict[str, Any]:
    method, num_draft = spec.speculation.method, spec.speculation.num_draft_tokens
    if method is SpeculationMethod.NGRAM:
        sizes = {"max_draft_len": num_draft, "max_matching_ngram_size": min(_MAX_MATCHING_NGRAM_SIZE, num_draft)}
        return {"decoding_type": "NGram", **sizes, "is_keep_all": True, "is_use_oldest": True, "is_public_pool": True}
    if method is SpeculationMethod.MTP:
        return {"decoding_type": "MTP", "num_nextn_predict_layers": num_draft}
    drafted = {"max_draft_len": num_draft, "speculative_model_dir": DRAFT_FOLDER}
    if method is SpeculationMethod.DRAFT_TARGET:
        return {"decoding_type": "Draft_Target", **drafted}
    if method is SpeculationMethod.EAGLE3:
        return {"decoding_type": "Eagle", **drafted, "eagle3_one_model": True}
    problem = "is not offered by TensorRT-LLM's PyTorch backend"
    hint = "Use the target `tensorrt_llm`."
    takes = "ngram, draft_target, eagle3, mtp"
    raise ConfigurationError(refusal("speculation.method", problem, limit=takes, given=method.value, hint=hint))


def _check(spec: Spec, source: Source) -> None:
    if source.format is not SourceFormat.HUGGING_FACE:
        problem = "must be a Hugging Face folder for the target `tensorrt_llm_pytorch`"
        raise ConfigurationError(refusal("model.source", problem, given=str(source.path)))
    asked, stored = spec.quantization.weights, source.stored or "none"
    if asked not in {None, WeightQuantization.AS_IN_FILE} and asked.value != stored:
        problem = "is not what the folder holds, and the LLM API serves a folder as it is"
        hint = "Quantize the model with NVIDIA's ModelOpt (`hf_ptq.py`) first and give that folder."
        raise ConfigurationError(refusal("quantization.weights", problem, limit=stored, given=asked.value, hint=hint))
    if (beams := spec.limits.max_beam_width) > 1:
        problem = "is 1 for the target `tensorrt_llm_pytorch`"
        hint = "The target `tensorrt_llm` searches beams."
        raise ConfigurationError(refusal("limits.max_beam_width", problem, limit=1, given=beams, hint=hint))


def _kv_dtype(spec: Spec, dtype: str) -> str:
    kv = spec.kv_cache.dtype
    if kv in _KV_COMPUTE and _KV_COMPUTE[kv] != dtype:
        problem = "is another than the compute type; the LLM API has that, or `fp8`"
        raise ConfigurationError(refusal("kv_cache.dtype", problem, limit=dtype, given=kv.value))
    return "fp8" if kv is KvType.FP8 else "auto"


def _config(spec: Spec) -> str:
    """``config.pbtxt``: the contract's tensors, served by Triton's Python backend."""
    config = make_config(TENSORRT_LLM.name)
    return replace(config, backend="python", max_batch_size=spec.limits.max_batch_size).render()
