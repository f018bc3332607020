"""The Llama family of decoders, as the few numbers and switches that set its members apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from enginehouse_contract.errors import ModelSourceError, refusal

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")
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
    max_position_embeddings: int  # tokens; at most the sliding window, within which attention is exact
    rms_norm_eps: float
    rope_theta: float
    is_tied: bool  # the head is the embedding
    rope_factors: tuple[float, ...] = ()  # what each rotation frequency is divided by; none means 1

    def __post_init__(self) -> None:
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ModelSourceError(refusal(field, "must be at least 1", given=getattr(self, field)))
        if self.num_heads % self.num_kv_heads:
            problem = "cannot be shared evenly by the attention heads"
            raise ModelSourceError(refusal("num_kv_heads", problem, limit=self.num_heads, given=self.num_kv_heads))
        if self.head_size % 2:
            raise ModelSourceError(refusal("head_size", "must be even to be rotated", given=self.head_size))
        if not 0.0 < self.rope_theta < math.inf:
            raise ModelSourceError(refusal("rope_theta", "must be a positive number", given=self.rope_theta))
        if self.rope_factors and len(self.rope_factors) != self.head_size // 2:
            problem = "must be one for each pair of dimensions"
            raise ModelSourceError(
                refusal("rope_factors", problem, limit=self.head_size // 2, given=len(self.rope_factors))
            )

    @property
    def rope_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each pair of dimensions, [head size / 2] (Su et al. 2021)."""
        factors = self.rope_factors or (1.0,) * (self.head_size // 2)
        return tuple(
            frequency / factor
            for frequency, factor in zip(plain_frequencies(self.head_size, self.rope_theta), factors, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 (Hugging Face's ``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def factors(self, head_size: int, rope_theta: float) -> tuple[float, ...]:
        """Return what each frequency is divided by.

        Wavelengths beyond the original context are stretched by ``factor``, short ones are kept, and those between are
        blended (Hugging Face's ``_compute_llama3_parameters``).
        """
        factors = []
        for frequency in plain_frequencies(head_size, rope_theta):
            num_turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
            blend = (num_turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = min(max(blend, 0.0), 1.0)
            factors.append(1.0 / ((1.0 - blend) / self.factor + blend))
        return tuple(factors)


def plain_frequencies(head_size: int, rope_theta: float) -> list[float]:
    """Return the unscaled rotation frequencies."""
    return [rope_theta ** (-2.0 * pair / head_size) for pair in range(head_size // 2)]
