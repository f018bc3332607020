"""What a spec says to `trtllm-build`, as flags, and to the Triton model that serves the engine, as parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.spec.model import SpeculationMethod, WeightQuantization
from enginehouse_builders.targets.emitted import DEFAULT_TOKENS_PER_BLOCK
from enginehouse_builders.targets.medusa import medusa_choices
from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from enginehouse_builders.spec.model import Spec

_W = WeightQuantization
_LORA_MODULES: Final = (
    *("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate", "mlp_gate_up"),
    *("cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense", "mlp_router"),
    *("moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router"),
)
_OPTIMAL_LORA_RANK: Final = 8
_LOOKAHEAD_WINDOW_SIZE: Final = 4  # LookaheadDecodingConfig's defaults
_LOOKAHEAD_VERIFICATION_SET_SIZE: Final = 4


def memory_flags(spec: Spec, kv: str | None, weights: WeightQuantization) -> dict[str, Any]:
    """Return the flags of the paged KV cache, of attention and of matrix products; *kv* is its quantization."""
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


def speculation_flags(spec: Spec) -> dict[str, Any]:
    """Return the flags of speculation; raise :class:`ConfigurationError` for a method that engines do not offer."""
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


def lora_flags(spec: Spec) -> dict[str, Any]:
    """Return the flags of adapters, less their folders; raise :class:`ConfigurationError` for an unknown module."""
    if spec.lora is None:
        return {}
    for module in spec.lora.target_modules:
        if module not in _LORA_MODULES:
            problem = "names a module that TensorRT-LLM does not have"
            raise ConfigurationError(
                refusal("lora.target_modules", problem, limit=", ".join(_LORA_MODULES), given=module)
            )
    return {
        "lora_plugin": "auto",
        "lora_ckpt_source": "hf",
        "lora_target_modules": list(spec.lora.target_modules),
        "max_lora_rank": spec.lora.max_rank,
    }


def serving_parameters(spec: Spec, medusa: tuple[int, int] | None) -> dict[str, str]:
    """Return the parameters of the Triton model `tensorrt_llm` that the spec decides; *medusa* is heads and layers."""
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
        parameters["lora_cache_optimal_adapter_size"] = str(min(spec.lora.max_rank, _OPTIMAL_LORA_RANK))
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
