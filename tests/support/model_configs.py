"""Configs of well-known models, as their publishers wrote them: the numbers that plans are made from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096, torch_dtype="float16"),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, max_position_embeddings=4096),
    "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, max_position_embeddings=4096),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32000, architectures=["MistralForCausalLM"], model_type="mistral"),
    "mixtral-8x7b": _llama(
        4096, 14336, 32, 32, 8, 32000, architectures=["MixtralForCausalLM"], model_type="mixtral",
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "qwen2.5-7b": _llama(3584, 18944, 28, 28, 4, 152064, architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    "qwen2.5-0.5b": _llama(
        896, 4864, 24, 14, 2, 151936, architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True
    ),
    "qwen3-8b": _llama(
        4096, 12288, 36, 32, 8, 151936, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128
    ),
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write a model's ``config.json``, without weights, and return its folder."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}), encoding="utf-8")
    return path
