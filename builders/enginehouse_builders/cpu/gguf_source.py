"""A GGUF file as a model source."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

from enginehouse_builders.cpu.architecture import ARCHITECTURES, Architecture
from enginehouse_builders.cpu.gguf_blocks import KNOWN_BLOCKS, split_blocks
from enginehouse_builders.cpu.gguf_file import GgufFile
from enginehouse_builders.cpu.gguf_tokenizer import tokenizer_files_of
from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from enginehouse_builders.cpu.gguf_file import GgufTensor
    from enginehouse_builders.cpu.source import FloatType, QuantizedMatrix

_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_CANONICAL_LAYER_NAMES: Final = {gguf_name: name for name, gguf_name in _LAYER_NAMES.items()}
_CANONICAL_TOP_NAMES: Final = {gguf_name: name for name, gguf_name in _TOP_NAMES.items()}
_ROPE_DIVISORS: Final = "rope_freqs.weight"
_FLOAT_TYPES: Final[dict[str, FloatType]] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class GgufSource:
    """Reads a GGUF file; raises :class:`ModelSourceError` for one that is damaged or of an unknown kind."""

    kind = "gguf"
    why_not_by_hand: str | None = None

    def __init__(self, path: Path, sha256: str) -> None:
        self.path = path
        self.sha256 = sha256
        file = GgufFile(path)
        self._metadata, self._tensors = file.metadata, file.tensors
        if (num_parts := self._metadata.get("split.count", 1)) != 1:
            raise ModelSourceError(f"{path} is one of {num_parts} parts; join them with `llama-gguf-split --merge`.")
        self._prefix = str(self._metadata.get("general.architecture"))
        self.architecture = self._read_architecture()
        self.name = str(self._metadata.get("general.basename") or self._metadata.get("general.name") or path.stem)

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return one weight in float32."""
        return self._unpermuted(name, self._values(_gguf_name(name)))

    def stored_weight(self, name: str) -> QuantizedMatrix | FloatType:
        """Return a matrix as quantized in the file, or its type; raise for a type that cannot be kept as it is."""
        tensor = self._tensor(_gguf_name(name))
        if tensor.kind in _FLOAT_TYPES:
            return _FLOAT_TYPES[tensor.kind]
        if tensor.kind not in KNOWN_BLOCKS:
            msg = (
                f"{self.path}: {_gguf_name(name)} has the type {tensor.kind}, which cannot be kept as in the file "
                f"(known: {', '.join(KNOWN_BLOCKS)}); build with int8, int4, f16 or f32 weights instead."
            )
            raise ModelSourceError(msg)
        return split_blocks(self._unpermuted(name, _rows(tensor)), tensor.kind)

    def weight_names(self) -> set[str]:
        """Return the names of all weights; those that have no canonical name keep their own."""
        return {_canonical_name(name) for name in self._tensors if name != _ROPE_DIVISORS}

    def tokenizer_files(self) -> dict[str, str]:
        """Return tokenizer files made from the file's metadata."""
        return tokenizer_files_of(self._metadata, str(self.path))

    def _tensor(self, gguf_name: str) -> GgufTensor:
        tensor = self._tensors.get(gguf_name)
        if tensor is None:
            raise ModelSourceError(f"{self.path} has no tensor {gguf_name}; the file is incomplete.")
        return tensor

    def _values(self, gguf_name: str) -> NDArray[np.float32]:
        tensor = self._tensor(gguf_name)
        try:
            values = gguf.dequantize(_rows(tensor), gguf.GGMLQuantizationType[tensor.kind])
        except (NotImplementedError, KeyError) as error:
            msg = f"{self.path}: {gguf_name} has the type {tensor.kind}, which cannot be read; use another file."
            raise ModelSourceError(msg) from error
        return values.reshape(tensor.shape).astype(np.float32)

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self._prefix}.{name}", default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelSourceError(f"{self.path} does not state {self._prefix}.{name} as one number.")
        return value

    def _read_architecture(self) -> Architecture:
        if self._prefix not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelSourceError(
                f"{self.path} holds a `{self._prefix}` model, which cannot be built; known: {known}."
            )
        num_heads, hidden_size = int(self._number("attention.head_count")), int(self._number("embedding_length"))
        head_size = int(self._number("attention.key_length", hidden_size // max(num_heads, 1)))
        for name, given in (
            ("attention.value_length", self._number("attention.value_length", head_size)),
            ("rope.dimension_count", self._number("rope.dimension_count", head_size)),
        ):
            if given != head_size:
                msg = f"{self.path}: {self._prefix}.{name} is {given}, which is supported only where it is {head_size}."
                raise ModelSourceError(msg)
        window = int(self._number("context_length"))
        return Architecture(
            name=self._prefix,
            vocab_size=int(self._tensor("token_embd.weight").shape[0]),
            hidden_size=hidden_size,
            intermediate_size=int(self._number("feed_forward_length")),
            num_layers=int(self._number("block_count")),
            num_heads=num_heads,
            num_kv_heads=int(self._number("attention.head_count_kv", num_heads)),
            head_size=head_size,
            max_position_embeddings=min(window, int(self._number("attention.sliding_window", window)) or window),
            rms_norm_eps=float(self._number("attention.layer_norm_rms_epsilon")),
            rope_theta=float(self._number("rope.freq_base", 10000.0)),
            is_tied="output.weight" not in self._tensors,
            rope_divisors=self._rope_divisors(head_size),
        )

    def _rope_divisors(self, head_size: int) -> tuple[float, ...] | None:
        """Llama 3.1's scaling is a tensor in the file, linear scaling a number."""
        kind = self._metadata.get(f"{self._prefix}.rope.scaling.type", "none")
        if kind not in {"none", "linear"}:
            msg = f"{self.path} scales its rotary embedding by `{kind}`, which is not supported for GGUF files."
            raise ModelSourceError(msg)
        if _ROPE_DIVISORS in self._tensors:
            return tuple(self._values(_ROPE_DIVISORS).reshape(-1).tolist())
        if kind == "none":
            return None
        return (float(self._number("rope.scaling.factor")),) * (head_size // 2)

    def _unpermuted(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Undo llama.cpp's order of query and key rows in Llama models: rotated pairs side by side."""
        projection = name.rsplit(".", 2)[-2]
        if self._prefix not in {"llama", "mistral"} or projection not in {"q_proj", "k_proj"}:
            return rows
        num_heads = self.architecture.num_heads if projection == "q_proj" else self.architecture.num_kv_heads
        if rows.shape[0] % (2 * num_heads):
            raise ModelSourceError(f"{self.path}: {name} has {rows.shape[0]} rows for {num_heads} heads.")
        paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _rows(tensor: GgufTensor) -> NDArray[np.uint8]:
    """A tensor's bytes, [rows, bytes]."""
    num_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return tensor.raw.reshape(num_rows, -1)


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, part = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{part}"


def _canonical_name(gguf_name: str) -> str:
    if gguf_name in _CANONICAL_TOP_NAMES:
        return _CANONICAL_TOP_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, rest = rest.partition(".")
    module, _, part = rest.rpartition(".")
    if prefix != "blk" or module not in _CANONICAL_LAYER_NAMES:
        return gguf_name
    return f"model.layers.{layer}.{_CANONICAL_LAYER_NAMES[module]}.{part}"
