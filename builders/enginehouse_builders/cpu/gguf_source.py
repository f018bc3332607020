"""A GGUF file as a model source."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np

from enginehouse_builders.cpu.architecture import ARCHITECTURES, Architecture
from enginehouse_builders.cpu.gguf_tokenizer import tokenizer_files_of
from enginehouse_builders.cpu.source import QuantizedMatrix
from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC: Final = b"GGUF"
_BLOCK: Final = 32

_LAYER_NAMES: Final = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_TOP_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_QUANTIZED: Final = ("Q4_0", "Q4_1", "Q8_0")
_FLOATS: Final = ("F32", "F16", "BF16")


class GgufSource:
    """Reads a GGUF file; raises :class:`ModelSourceError` for one that is damaged or of an unknown kind."""

    kind = "gguf"
    why_not_by_hand: str | None = None

    def __init__(self, path: Path, sha256: str) -> None:
        self.path = path
        self.sha256 = sha256
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        _check_complete(path, self._reader)
        self.architecture = self._read_architecture()
        self.name = str(self._field("general.basename") or self._field("general.name") or path.stem)

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return one weight in float32."""
        tensor = self._tensor(name)
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, KeyError) as error:
            kind = tensor.tensor_type.name
            msg = f"{self.path}: {tensor.name} has the type {kind}, which cannot be read; use a file of another type."
            raise ModelSourceError(msg) from error
        shape = [int(size) for size in reversed(tensor.shape)]
        values = np.ascontiguousarray(values.reshape(shape), np.float32)
        return self._unpermute(name, values)

    def quantized_weight(self, name: str) -> QuantizedMatrix | None:
        """Return a matrix as quantized in the file; raise for a type that cannot be kept as it is."""
        tensor = self._tensor(name)
        kind = tensor.tensor_type.name
        if kind in _FLOATS:
            return None
        if kind not in _QUANTIZED:
            msg = (
                f"{self.path}: {tensor.name} is {kind}, which cannot be kept as in the file (known: "
                f"{', '.join(_QUANTIZED)}); build with int8, int4, f16 or f32 weights instead."
            )
            raise ModelSourceError(msg)
        rows = int(tensor.shape[1])
        raw = np.ascontiguousarray(tensor.data).reshape(rows, -1)
        return _split_blocks(self._unpermute(name, raw), kind)

    def has_weight(self, name: str) -> bool:
        """Return whether the file has a weight of this name."""
        return _gguf_name(name) in self._tensors

    def tokenizer_files(self) -> dict[str, str]:
        """Return tokenizer files made from the file's metadata."""
        return tokenizer_files_of(self._field, str(self.path))

    @cached_property
    def _prefix(self) -> str:
        return str(self._field("general.architecture"))

    def _tensor(self, name: str) -> Any:
        tensor = self._tensors.get(_gguf_name(name))
        if tensor is None:
            raise ModelSourceError(f"{self.path} has no tensor {_gguf_name(name)}; the file is incomplete.")
        return tensor

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        return None if field is None else field.contents()

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._field(f"{self._prefix}.{name}")
        if value is None:
            value = default
        if value is None:
            raise ModelSourceError(f"{self.path} does not state {self._prefix}.{name}; it cannot be built from.")
        return float(value)

    def _read_architecture(self) -> Architecture:
        if self._prefix not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelSourceError(
                f"{self.path} holds a `{self._prefix}` model, which cannot be built; known: {known}."
            )
        num_heads = int(self._number("attention.head_count"))
        hidden_size = int(self._number("embedding_length"))
        if self._field(f"{self._prefix}.rope.scaling.type") not in {None, "none"}:
            kind = self._field(f"{self._prefix}.rope.scaling.type")
            raise ModelSourceError(
                f"{self.path} scales its rotary embedding ({kind}), which is not supported for GGUF."
            )
        return Architecture(
            name=self._prefix,
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden_size,
            intermediate_size=int(self._number("feed_forward_length")),
            num_layers=int(self._number("block_count")),
            num_heads=num_heads,
            num_kv_heads=int(self._number("attention.head_count_kv", num_heads)),
            head_size=int(self._number("attention.key_length", hidden_size // num_heads)),
            max_position_embeddings=int(self._number("context_length")),
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            rope_theta=self._number("rope.freq_base", 10000.0),
            is_tied="output.weight" not in self._tensors,
            has_qkv_bias="blk.0.attn_q.bias" in self._tensors,
            has_qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
        )

    def _unpermute(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Undo llama.cpp's order of query and key rows in Llama models: rotated pairs side by side."""
        if self._prefix not in {"llama", "mistral"} or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return rows
        num_heads = self.architecture.num_heads if ".q_proj" in name else self.architecture.num_kv_heads
        half = rows.shape[0] // num_heads // 2
        paired = rows.reshape(num_heads, half, 2, *rows.shape[1:])
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES.get(rest, rest)}"


def _open(path: Path) -> Any:
    try:
        with path.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read ({error.strerror or error}).") from error
    if magic != _MAGIC:
        raise ModelSourceError(f"{path} is not a GGUF file: it begins with {magic!r}.")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader raises whatever its memory map makes of a damaged file
        raise ModelSourceError(f"{path} is damaged or truncated ({type(error).__name__}: {error}).") from error


def _check_complete(path: Path, reader: Any) -> None:
    if not reader.tensors:
        raise ModelSourceError(f"{path} holds no tensors.")
    end = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors)
    if (num_bytes := path.stat().st_size) < end:
        raise ModelSourceError(f"{path} is truncated: {num_bytes} bytes, its tensors need {end}.")
    if not any(tensor.name == "token_embd.weight" for tensor in reader.tensors):
        raise ModelSourceError(f"{path} has no token embedding; it is not a language model.")


def _split_blocks(raw: NDArray[np.uint8], kind: str) -> QuantizedMatrix:
    """Take GGML's blocks of 32 values apart (ggml-quants.h: block_q4_0, block_q4_1, block_q8_0)."""
    num_header_bytes = 4 if kind == "Q4_1" else 2
    num_quant_bytes = _BLOCK if kind == "Q8_0" else _BLOCK // 2
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, num_header_bytes + num_quant_bytes)
    header = np.ascontiguousarray(blocks[:, :, :num_header_bytes]).view(np.float16)
    body = np.ascontiguousarray(blocks[:, :, num_header_bytes:])
    scales = np.ascontiguousarray(header[:, :, :1])
    if kind == "Q8_0":
        return QuantizedMatrix(8, body.view(np.int8), scales)
    # The lower halves of the 16 bytes are the first 16 values, the upper halves the rest.
    quants = np.concatenate([body & 0x0F, body >> 4], axis=2)
    offsets = header[:, :, 1:2] if kind == "Q4_1" else (scales * np.float16(-8))
    return QuantizedMatrix(4, quants, scales, np.ascontiguousarray(offsets))
