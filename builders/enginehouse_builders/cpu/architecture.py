"""The Llama family of decoders, as the few numbers and switches that set its members apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures that the hand-built graph knows, by Hugging Face's and GGUF's names alike."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of Llama 3.1 (Hugging Face's ``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the graph builder needs to know of a model."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    is_tied: bool  # the head is the embedding
    rope_scaling: RopeScaling | None = None
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
