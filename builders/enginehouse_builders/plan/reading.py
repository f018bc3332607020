"""A model's shape from its config alone: Hugging Face's, TensorRT-LLM's (checkpoint or engine), or a GGUF's head."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.plan.gguf_header import read_gguf_header
from enginehouse_builders.plan.shape import Experts, LatentAttention, ModelShape, StoredWeights
from enginehouse_builders.spec.model import SourceFormat
from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path

_CONFIG: Final = "config.json"
_DTYPES: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float": "f32", "half": "f16"}
_UNGATED: Final = frozenset({"gpt2", "gptj", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2", "gpt_bigcode"})
_GGUF_BITS: Final = {  # of one value, scales included (ggml-common.h)
    "F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5,
    "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.25,
    "IQ2_XXS": 2.0625, "IQ2_XS": 2.3125, "IQ2_S": 2.5, "IQ3_XXS": 3.0625, "IQ3_S": 3.4375, "MXFP4": 4.25,
}  # fmt: skip
_CPU_BITS: Final = {  # as the CPU engine keeps them: 4 or 8 bits with an f32 scale (and zero point) per block
    "F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q4_0": 6.0, "Q4_1": 6.0, "Q5_0": 9.0, "Q5_1": 10.0, "Q8_0": 9.0,
    "Q4_K": 6.0, "Q5_K": 10.0, "Q6_K": 10.0,
}  # fmt: skip
_QUANT_BITS: Final = {  # TensorRT-LLM's and Hugging Face's names of methods -> bits of one matrix value
    "w8a16": 8.0, "w4a16": 4.0, "w4a16_awq": 4.125, "w4a8_awq": 4.125, "w4a16_gptq": 4.25, "fp8": 8.0, "nvfp4": 4.5,
    "fp8_per_channel_per_token": 8.0, "fp8_block_scales": 8.0, "mxfp4": 4.25, "fbgemm_fp8": 8.0,
}  # fmt: skip


def detect_format(path: Path) -> SourceFormat:
    """Return what the files at *path* are.

    Raises :class:`ModelSourceError` when there is nothing, or nothing that is known.
    """
    if not path.exists():
        raise ModelSourceError(
            f"{path} does not exist; give a GGUF file, a Hugging Face folder or a TensorRT-LLM checkpoint."
        )
    if path.is_file():
        return SourceFormat.GGUF
    config = _read_config(path)
    if "pretrained_config" in config or ("architecture" in config and "architectures" not in config):
        return SourceFormat.TENSORRT_LLM_CHECKPOINT
    return SourceFormat.HUGGING_FACE


def read_shape(path: Path, source_format: SourceFormat = SourceFormat.AUTO) -> ModelShape:
    """Read the shape of the model at *path*; no weights are opened.

    Raises :class:`ModelSourceError` naming the file and the field that is missing, damaged or impossible.
    """
    found = detect_format(path)
    if source_format not in {SourceFormat.AUTO, found}:
        raise ModelSourceError(f"{path} is in the format `{found.value}`, not `{source_format.value}`.")
    if found is SourceFormat.GGUF:
        return _gguf_shape(path)
    config = _read_config(path)
    if found is SourceFormat.TENSORRT_LLM_CHECKPOINT:
        return _tensorrt_llm_shape(_Config(path, config.get("pretrained_config", config)), _device_of(path))
    return _hugging_face_shape(_Config(path, config))


class _Config:
    """A config's numbers by name, the first name that is there; the text part of a multimodal model."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        inner = values.get("text_config")
        self.values = {**values, **inner} if isinstance(inner, dict) else values

    def count(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ModelSourceError(f"{self._path}: {name} must be a whole number of at least 0; it is {value!r}.")
            return value
        if default is None:
            raise ModelSourceError(f"{self._path / _CONFIG} does not state {names[0]}; it is not a decoder's config.")
        return default

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name)
        return value if isinstance(value, str) else default

    def part(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        return value if isinstance(value, dict) else {}


def _hugging_face_shape(config: _Config) -> ModelShape:
    num_heads = config.count("num_attention_heads", "n_head")
    hidden_size = config.count("hidden_size", "n_embd", "d_model")
    architectures = config.values.get("architectures")
    model_type = config.text("model_type")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else model_type
    # without these, the intermediate size is four times the hidden one (GPT-2)
    intermediate = config.count("intermediate_size", "n_inner", "ffn_hidden_size", default=4 * hidden_size)
    return ModelShape(
        architecture=name,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate,
        num_layers=config.count("num_hidden_layers", "n_layer"),
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", default=num_heads),
        head_size=config.count("head_dim", default=hidden_size // max(num_heads, 1)),
        max_position_embeddings=config.count("max_position_embeddings", "n_positions", default=2048),
        dtype=_DTYPES.get(config.text("dtype") or config.text("torch_dtype"), "f16"),
        is_tied=bool(config.values.get("tie_word_embeddings", False)),
        num_mlp_matrices=2 if model_type in _UNGATED else 3,
        experts=_experts(config, intermediate),
        latent=_latent(config),
        stored=_stored(config.part("quantization_config"), "quant_method"),
        source_format=SourceFormat.HUGGING_FACE.value,
    )


def _experts(config: _Config, intermediate_size: int) -> Experts | None:
    num_experts = config.count("num_local_experts", "n_routed_experts", "num_experts", default=0)
    if num_experts <= 1:
        return None
    size = config.count("moe_intermediate_size", default=intermediate_size)
    shared = config.count("shared_expert_intermediate_size", default=config.count("n_shared_experts", default=0) * size)
    return Experts(
        num_experts=num_experts,
        num_per_token=config.count("num_experts_per_tok", "experts_per_token", default=1),
        intermediate_size=size,
        shared_intermediate_size=shared,
        num_dense_layers=config.count("first_k_dense_replace", default=0),
    )


def _latent(config: _Config) -> LatentAttention | None:
    if config.values.get("kv_lora_rank") is None:
        return None
    return LatentAttention(
        kv_rank=config.count("kv_lora_rank"),
        rope_head_size=config.count("qk_rope_head_dim"),
        nope_head_size=config.count("qk_nope_head_dim"),
        value_head_size=config.count("v_head_dim"),
        q_rank=config.values.get("q_lora_rank"),
    )


def _stored(quantization: dict[str, Any], key: str) -> StoredWeights | None:
    method = quantization.get(key) or quantization.get("quant_algo")
    if not isinstance(method, str):
        return None
    bits = _QUANT_BITS.get(method.lower())
    if bits is None and isinstance(declared := quantization.get("bits"), int | float):
        bits = declared + 32 / max(int(quantization.get("group_size") or 128), 1)  # a scale and a zero point
    return StoredWeights(method.lower(), bits if bits is not None else 8.0, 16.0)


def _tensorrt_llm_shape(config: _Config, built_for: str | None) -> ModelShape:
    num_heads, hidden_size = config.count("num_attention_heads"), config.count("hidden_size")
    intermediate = config.count("intermediate_size", default=4 * hidden_size)
    moe = config.part("moe")
    experts = None
    if (num_experts := moe.get("num_experts") or config.values.get("moe_num_experts") or 0) > 1:
        experts = Experts(num_experts, moe.get("top_k") or config.values.get("moe_top_k") or 1, intermediate)
    stored = _stored(config.part("quantization"), "quant_algo")
    return ModelShape(
        architecture=config.text("architecture", "unknown"),
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate,
        num_layers=config.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", default=num_heads),
        head_size=config.count("head_size", default=hidden_size // max(num_heads, 1)),
        max_position_embeddings=config.count("max_position_embeddings", default=2048),
        dtype=_DTYPES.get(config.text("dtype"), "f16"),
        num_mlp_matrices=3 if config.text("hidden_act") in {"silu", "swiglu", "geglu", ""} else 2,
        experts=experts,
        stored=stored,
        source_format=SourceFormat.TENSORRT_LLM_CHECKPOINT.value,
        built_for=built_for,
    )


def _gguf_shape(path: Path) -> ModelShape:
    header = read_gguf_header(path)
    prefix = str(header.metadata.get("general.architecture"))

    def count(name: str, default: int | None = None) -> int:
        value = header.metadata.get(f"{prefix}.{name}", default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelSourceError(f"{path} does not state {prefix}.{name} as one whole number.")
        return value

    num_heads, hidden_size = count("attention.head_count"), count("embedding_length")
    num_experts, intermediate = count("expert_count", 0), count("feed_forward_length")
    experts = None
    if num_experts > 1:
        size = count("expert_feed_forward_length", intermediate)
        experts = Experts(num_experts, count("expert_used_count", 1), size)
    return ModelShape(
        architecture=prefix,
        vocab_size=header.vocab_size or count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate,
        num_layers=count("block_count"),
        num_heads=num_heads,
        num_kv_heads=count("attention.head_count_kv", num_heads),
        head_size=count("attention.key_length", hidden_size // max(num_heads, 1)),
        max_position_embeddings=count("context_length"),
        dtype="f16",
        is_tied=not header.has_head,
        num_mlp_matrices=2 if prefix in _UNGATED else 3,
        experts=experts,
        stored=_gguf_stored(path, header.num_matrix_values, header.num_vocab_values),
        source_format=SourceFormat.GGUF.value,
    )


def _gguf_stored(path: Path, matrices: Counter[str], vocab: Counter[str]) -> StoredWeights:
    matrix_bits, vocab_bits = _mean_bits(matrices, _GGUF_BITS), _mean_bits(vocab, _GGUF_BITS)
    if matrix_bits is None or vocab_bits is None:
        unknown = sorted((set(matrices) | set(vocab)) - set(_GGUF_BITS))
        problem = f"has tensors of the type {unknown[0]}, whose size is not known" if unknown else "holds no matrices"
        raise ModelSourceError(f"{path} {problem}; use another file.")
    return StoredWeights(
        method=matrices.most_common(1)[0][0],
        matrix_bits=matrix_bits,
        vocab_bits=vocab_bits,
        cpu_matrix_bits=_mean_bits(matrices, _CPU_BITS),
        cpu_vocab_bits=_mean_bits(vocab, _CPU_BITS),
    )


def _mean_bits(num_values: Counter[str], bits: dict[str, float]) -> float | None:
    total = sum(num_values.values())
    if not total or not num_values.keys() <= bits.keys():
        return None
    return math.fsum(bits[kind] * count for kind, count in num_values.items()) / total


def _device_of(path: Path) -> str | None:
    """The architecture that the engine in *path* was built for, where our manifest beside it says so."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    versions = manifest.get("tool_versions") if isinstance(manifest, dict) else None
    return str(versions["gpu_architecture"]) if isinstance(versions, dict) and "gpu_architecture" in versions else None


def _read_config(path: Path) -> dict[str, Any]:
    file = path / _CONFIG
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelSourceError(f"{path} has no {_CONFIG}; it is not a model's folder.") from error
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{file} is not readable JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{file} must hold a JSON object.")
    return value
