"""A decoder as the numbers that decide its size: layers, heads, experts. Counts are exact to norms and biases."""

from __future__ import annotations

from dataclasses import dataclass

from enginehouse_contract.errors import ModelSourceError, refusal

_MIN_ONE = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "intermediate_size")


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of a layer: each token goes through ``num_per_token`` of ``num_experts``, and the shared ones."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    num_dense_layers: int = 0  # the first layers that have no mixture


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a token's cache is a latent and a key part."""

    kv_rank: int
    rope_head_size: int
    nope_head_size: int
    value_head_size: int
    q_rank: int | None = None


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights as the source's own files hold them, where it says: a method's name and the exact bytes."""

    method: str  # "Q4_1", "fp8", "awq": the source's word for it
    matrix_bits: float  # bits of one value of the layers' matrices, scales included
    vocab_bits: float  # bits of one value of embedding and head
    cpu_matrix_bits: float | None = None  # as the CPU engine stores them; None: it cannot
    cpu_vocab_bits: float | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model; raises :class:`ModelSourceError` for numbers that no model can have."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    dtype: str = "bf16"  # of the source's numbers: f32, f16 or bf16
    is_tied: bool = False
    num_mlp_matrices: int = 3  # gate, up and down; 2 without a gate
    experts: Experts | None = None
    latent: LatentAttention | None = None
    stored: StoredWeights | None = None
    source_format: str = "huggingface"
    built_for: str | None = None  # the device architecture of an engine, where the folder says

    def __post_init__(self) -> None:
        for field in _MIN_ONE:
            if getattr(self, field) < 1:
                raise ModelSourceError(refusal(field, "must be at least 1", given=getattr(self, field)))

    @property
    def embedding_params(self) -> int:
        """Values of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """Values of the output head; none of its own where it is the embedding."""
        return 0 if self.is_tied else self.embedding_params

    @property
    def attention_params(self) -> int:
        """Values of one layer's attention matrices."""
        hidden, heads = self.hidden_size, self.num_heads
        if (mla := self.latent) is None:
            return hidden * self.head_size * (2 * heads + 2 * self.num_kv_heads)
        query_size = heads * (mla.nope_head_size + mla.rope_head_size)
        query = hidden * query_size if mla.q_rank is None else mla.q_rank * (hidden + query_size)
        latent = hidden * (mla.kv_rank + mla.rope_head_size)
        expanded = mla.kv_rank * heads * (mla.nope_head_size + mla.value_head_size)
        return query + latent + expanded + heads * mla.value_head_size * hidden

    @property
    def num_moe_layers(self) -> int:
        """Layers with a mixture of experts."""
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def layers_params(self) -> int:
        """Values of all layers' matrices."""
        return self._layers_params(None if self.experts is None else self.experts.num_experts)

    @property
    def active_layers_params(self) -> int:
        """Values of the layers' matrices that one token meets."""
        return self._layers_params(None if self.experts is None else self.experts.num_per_token)

    @property
    def expert_params(self) -> int:
        """Values of one routed expert of one layer."""
        return 0 if self.experts is None else self._mlp(self.experts.intermediate_size)

    @property
    def num_params(self) -> int:
        """Values of the whole model, but for norms and biases."""
        return self.layers_params + self.embedding_params + self.head_params

    @property
    def active_params(self) -> int:
        """Values that a product with one token's activations meets; the embedding is looked up, the head multiplied."""
        return self.active_layers_params + self.embedding_params

    def _mlp(self, intermediate_size: int) -> int:
        return self.num_mlp_matrices * self.hidden_size * intermediate_size

    def _layers_params(self, num_experts: int | None) -> int:
        total = self.num_layers * self.attention_params
        dense = self.num_layers - self.num_moe_layers
        total += dense * self._mlp(self.intermediate_size)
        if self.experts is not None and num_experts is not None:
            router = self.hidden_size * self.experts.num_experts
            shared = self._mlp(self.experts.shared_intermediate_size)
            total += self.num_moe_layers * (num_experts * self.expert_params + shared + router)
        return total
