"""Tiny random models of the Llama family, written as GGUF or safetensors, and a plain numpy forward pass of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tests.support.small_tokenizers import write_byte_level

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Weights = dict[str, NDArray[np.float32]]

_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class TinyModel:
    """A random model; weights have Hugging Face's names."""

    name: str = "llama"
    is_tied: bool = True
    llama3_scaling: bool = False
    vocab_size: int = 96
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    window: int = 256
    eps: float = 1e-5
    rope_theta: float = 10000.0
    seed: int = 0
    weights: Weights = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        query_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (self.hidden_size,),
                f"{prefix}.post_attention_layernorm.weight": (self.hidden_size,),
                f"{prefix}.self_attn.q_proj.weight": (query_size, self.hidden_size),
                f"{prefix}.self_attn.k_proj.weight": (kv_size, self.hidden_size),
                f"{prefix}.self_attn.v_proj.weight": (kv_size, self.hidden_size),
                f"{prefix}.self_attn.o_proj.weight": (self.hidden_size, query_size),
                f"{prefix}.mlp.gate_proj.weight": (self.intermediate_size, self.hidden_size),
                f"{prefix}.mlp.up_proj.weight": (self.intermediate_size, self.hidden_size),
                f"{prefix}.mlp.down_proj.weight": (self.hidden_size, self.intermediate_size),
            }
            if self.name == "qwen2":
                shapes |= {f"{prefix}.self_attn.{part}_proj.bias": (size,) for part, size in
                           (("q", query_size), ("k", kv_size), ("v", kv_size))}  # fmt: skip
            if self.name == "qwen3":
                shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (self.head_size,) for part in "qk"}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        weights = {}
        for name, shape in shapes.items():
            values = rng.normal(size=shape) / math.sqrt(shape[-1])
            weights[name] = (1.0 + values if "norm" in name else values).astype(np.float32)
        object.__setattr__(self, "weights", weights)

    def config(self) -> dict[str, Any]:
        """Hugging Face's ``config.json``."""
        return {
            "model_type": self.name,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": self.window,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.is_tied,
            "rope_scaling": LLAMA3_SCALING if self.llama3_scaling else None,
        }

    def write_folder(self, folder: Path, num_shards: int = 1, **config: Any) -> Path:
        """Write config, float32 safetensors and a tokenizer; *config* replaces entries of the config."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**self.config(), **config}), encoding="utf-8")
        write_byte_level(folder)
        if num_shards == 1:
            save_file(self.weights, folder / "model.safetensors")
            return folder
        weight_map: dict[str, str] = {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
            part = {name: self.weights[name] for name in sorted(self.weights)[shard::num_shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return folder

    def write_gguf(self, path: Path, kind: str = "F32", **replaced: Any) -> Path:
        """Write a GGUF file with matrices of *kind*, rows ordered as llama.cpp's converter does.

        *replaced* replaces metadata (dots written as two underscores), or removes it where the value is None.
        """
        writer = gguf.GGUFWriter(path, "llama" if self.name == "mistral" else self.name)
        arch = "llama" if self.name == "mistral" else self.name
        metadata: dict[str, Any] = {
            f"{arch}.context_length": self.window,
            f"{arch}.embedding_length": self.hidden_size,
            f"{arch}.feed_forward_length": self.intermediate_size,
            f"{arch}.block_count": self.num_layers,
            f"{arch}.attention.head_count": self.num_heads,
            f"{arch}.attention.head_count_kv": self.num_kv_heads,
            f"{arch}.attention.key_length": self.head_size,
            f"{arch}.attention.layer_norm_rms_epsilon": self.eps,
            f"{arch}.rope.freq_base": self.rope_theta,
            **tokenizer_metadata(self.vocab_size),
            **{name.replace("__", "."): value for name, value in replaced.items()},
        }
        for name, value in metadata.items():
            _add_metadata(writer, name, value)
        if self.llama3_scaling:
            writer.add_tensor("rope_freqs.weight", self._llama3_divisors())
        for name, weight in self.weights.items():
            is_matrix = weight.ndim == 2
            values = self._permuted(name, weight) if arch == "llama" else weight
            quant_type = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
            writer.add_tensor(gguf_name(name), gguf.quantize(values, quant_type), raw_dtype=quant_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def logits(self, token_ids: list[int], weights: Weights | None = None) -> NDArray[np.float64]:
        """Run the model over a sequence in float64, [tokens, vocab]: loops over heads and positions, no cache."""
        own = {name: value.astype(np.float64) for name, value in (weights or self.weights).items()}
        hidden = own["model.embed_tokens.weight"][token_ids]
        for layer in range(self.num_layers):
            part = {
                name.split(".", 3)[3]: value for name, value in own.items() if name.startswith(f"model.layers.{layer}.")
            }
            hidden = hidden + self._attention(_rms_norm(hidden, part["input_layernorm.weight"], self.eps), part)
            normed = _rms_norm(hidden, part["post_attention_layernorm.weight"], self.eps)
            gate = normed @ part["mlp.gate_proj.weight"].T
            up = normed @ part["mlp.up_proj.weight"].T
            hidden = hidden + (gate / (1.0 + np.exp(-gate)) * up) @ part["mlp.down_proj.weight"].T
        head = own["model.embed_tokens.weight" if self.is_tied else "lm_head.weight"]
        return _rms_norm(hidden, own["model.norm.weight"], self.eps) @ head.T

    def _attention(self, normed: NDArray[np.float64], part: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        def project(name: str) -> NDArray[np.float64]:
            product = normed @ part[f"self_attn.{name}_proj.weight"].T + part.get(f"self_attn.{name}_proj.bias", 0.0)
            heads = product.reshape(len(normed), -1, self.head_size)
            norm = part.get(f"self_attn.{name}_norm.weight")
            return heads if norm is None else _rms_norm(heads, norm, self.eps)

        query, key, value = project("q"), project("k"), project("v")
        num_shared = self.num_heads // self.num_kv_heads
        out = np.zeros_like(query)
        for head in range(self.num_heads):
            for at in range(len(normed)):
                turned = self._rotated(query[at, head], at)
                keys = np.array([self._rotated(key[past, head // num_shared], past) for past in range(at + 1)])
                scores = keys @ turned / math.sqrt(self.head_size)
                shares = np.exp(scores - scores.max())
                out[at, head] = shares / shares.sum() @ value[: at + 1, head // num_shared]
        return out.reshape(len(normed), -1) @ part["self_attn.o_proj.weight"].T

    def _rotated(self, vector: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        """Turn the pairs (i, i + half), as complex numbers."""
        half = self.head_size // 2
        frequencies = self.rope_theta ** (-np.arange(half) / half)
        if self.llama3_scaling:
            frequencies = frequencies / self._llama3_divisors()
        turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * frequencies)
        return np.concatenate([turned.real, turned.imag])

    def _llama3_divisors(self) -> NDArray[np.float32]:
        """Branch by branch, as in llama.cpp's ``convert_hf_to_gguf.py``."""
        scaling, divisors = LLAMA3_SCALING, []
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])  # type: ignore[arg-type]
        factor, window = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])  # type: ignore[arg-type]
        for pair in range(self.head_size // 2):
            wavelength = 2 * math.pi * self.rope_theta ** (2 * pair / self.head_size)
            if wavelength < window / high:
                divisors.append(1.0)
            elif wavelength > window / low:
                divisors.append(factor)
            else:
                smooth = (window / wavelength - low) / (high - low)
                divisors.append(1 / ((1 - smooth) / factor + smooth))
        return np.array(divisors, np.float32)

    def _permuted(self, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """The order of query and key rows that llama.cpp's converter gives Llama models."""
        for part, num_heads in (("q_proj", self.num_heads), ("k_proj", self.num_kv_heads)):
            if f".{part}." in name:
                halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
                return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
        return weight


def gguf_name(name: str) -> str:
    """A weight's name in a GGUF file."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    module, part = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{part}"


def tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE of single bytes, some merges, and two special tokens at the end."""
    alphabet = sorted(gguf_alphabet())[: vocab_size - 4]
    tokens = [*alphabet, "he", "ll", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def gguf_alphabet() -> list[str]:
    """The characters that stand for bytes in a byte-level BPE."""
    from tokenizers import pre_tokenizers  # noqa: PLC0415 - only here

    return list(pre_tokenizers.ByteLevel.alphabet())


def _add_metadata(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    else:
        writer.add_string(name, value)


def _rms_norm(hidden: NDArray[np.float64], weight: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    normed: NDArray[np.float64] = hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + eps)
    return normed * weight
