"""The Llama family of decoders, as the few numbers and switches that set its members apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from enginehouse_contract.errors import ModelSourceError, refusal

_CLASS_NAMES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ARCHITECTURES: Final = tuple(_CLASS_NAMES)
"""Architectures that the hand-built graph knows, by Hugging Face's and GGUF's names alike."""

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the graph builder needs to know of a model; raises :class:`ModelSourceError` for what no model can be."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int  # tokens; at most the sliding window, within which full attention is exact
    rms_norm_eps: float
    rope_theta: float
    is_tied: bool  # the head is the embedding
    rope_divisors: tuple[float, ...] | None = None  # of each rotation frequency, [head size / 2]

    def __post_init__(self) -> None:
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ModelSourceError(refusal(field, "must be at least 1", given=getattr(self, field)))
        if self.num_heads % self.num_kv_heads:
            problem = "cannot be shared evenly by the attention heads"
            raise ModelSourceError(refusal("num_kv_heads", problem, limit=self.num_heads, given=self.num_kv_heads))
        if self.head_size % 2:
            raise ModelSourceError(refusal("head_size", "must be even to be rotated", given=self.head_size))
        if self.rope_theta <= 0.0:
            raise ModelSourceError(refusal("rope_theta", "must be positive", given=self.rope_theta))
        if self.rope_divisors is not None and min(self.rope_divisors, default=0.0) <= 0.0:
            raise ModelSourceError(refusal("rope_divisors", "must be positive", given=self.rope_divisors))

    @property
    def class_name(self) -> str:
        """The name that Hugging Face's and TensorRT-LLM's configs give it."""
        return _CLASS_NAMES.get(self.name, self.name)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether query, key and value projections must have a bias."""
        return self.name == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normed, head by head."""
        return self.name == "qwen3"
