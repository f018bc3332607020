"""What the engine folder says of itself: limits within the model's, and ``config.json`` in TensorRT-LLM's shape."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.manifest import BuildLimits

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse_builders.cpu.architecture import Architecture
    from enginehouse_builders.cpu.options import BuildOptions

TOKENS_PER_BLOCK: Final = 32  # fixed by OpenVINO's CPU kernels
_DEFAULT_MAX_SEQ_LEN: Final = 8192
_QUANT_ALGOS: Final = {"int8": "W8A16", "int4": "W4A16", "int4_awq": "W4A16_AWQ", "int4_gptq": "W4A16_GPTQ"}


def resolve_limits(options: BuildOptions, arch: Architecture) -> BuildLimits:
    """Return the limits with those left open filled in; raise :class:`ConfigurationError` for what cannot be."""
    window = arch.max_position_embeddings
    max_seq_len = options.max_seq_len or min(window, _DEFAULT_MAX_SEQ_LEN)
    if max_seq_len > window:
        problem = "is beyond the model's window"
        raise ConfigurationError(refusal("max_seq_len", problem, limit=window, given=max_seq_len))
    max_input_len = options.max_input_len or max_seq_len - 1
    if max_input_len >= max_seq_len:
        problem = "leaves no room for an answer"
        raise ConfigurationError(refusal("max_input_len", problem, limit=max_seq_len - 1, given=max_input_len))
    return BuildLimits(options.max_batch_size, max_input_len, max_seq_len, options.max_num_tokens)


def engine_config(options: BuildOptions, arch: Architecture, limits: BuildLimits) -> dict[str, Any]:
    """Return the engine folder's ``config.json``, in TensorRT-LLM's shape."""
    quantization: dict[str, Any] = {
        "quant_algo": _QUANT_ALGOS.get(options.weight_precision),
        "kv_cache_quant_algo": "INT8" if options.kv_precision == "u8" else None,
    }
    if options.int4_group_size is not None:
        quantization["group_size"] = options.int4_group_size
    return {
        "version": f"enginehouse-{metadata.version('enginehouse')}",
        "pretrained_config": {
            "architecture": arch.class_name,
            "dtype": "float32",
            "vocab_size": arch.vocab_size,
            "hidden_size": arch.hidden_size,
            "intermediate_size": arch.intermediate_size,
            "num_hidden_layers": arch.num_layers,
            "num_attention_heads": arch.num_heads,
            "num_key_value_heads": arch.num_kv_heads,
            "head_size": arch.head_size,
            "max_position_embeddings": arch.max_position_embeddings,
            "quantization": quantization,
        },
        "build_config": {
            "max_batch_size": limits.max_batch_size,
            "max_input_len": limits.max_input_len,
            "max_seq_len": limits.max_seq_len,
            "max_num_tokens": limits.max_num_tokens,
            "max_beam_width": 1,
            "kv_cache_type": "PAGED",
            "plugin_config": {"tokens_per_block": TOKENS_PER_BLOCK},
        },
    }


def chat_template_sha256(tokenizer_config: Path) -> str | None:
    """Return the digest of the chat template in a ``tokenizer_config.json``; None where there is none."""
    template = json.loads(tokenizer_config.read_text(encoding="utf-8")).get("chat_template")
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None
