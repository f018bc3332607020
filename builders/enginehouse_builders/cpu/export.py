"""Architectures beyond the hand-built graph, converted by optimum-intel (the extra `export`, which brings torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from enginehouse_builders.cpu.architecture import Architecture
from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    import openvino as ov

    from enginehouse_builders.cpu.weights import WeightPrecision


def exported_architecture(folder: Path, reason: str) -> Architecture:
    """Return the architecture of a Hugging Face folder in transformers' reading; *reason* as in :func:`export_decoder`.

    Raises :class:`ModelSourceError` when the extra is not installed or the folder holds no model for generation.
    """
    transformers = _import("transformers", folder, reason)
    try:
        config = transformers.AutoConfig.from_pretrained(folder).get_text_config()
        num_heads = int(config.num_attention_heads)
        return Architecture(
            name=(config.architectures or [config.model_type])[0],
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
            num_layers=int(config.num_hidden_layers),
            num_heads=num_heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
            head_size=int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
            max_position_embeddings=int(config.max_position_embeddings),
            rms_norm_eps=float(getattr(config, "rms_norm_eps", 0.0)),
            rope_theta=float(getattr(config, "rope_theta", None) or 10000.0),
            is_tied=bool(config.tie_word_embeddings),
        )
    except Exception as error:  # transformers raises whatever a config makes it raise
        raise ModelSourceError(f"{folder} holds no model that can be built ({_first_line(error)}).") from error


def export_decoder(folder: Path, precision: WeightPrecision, reason: str, *, int4_group_size: int) -> ov.Model:
    """Convert a Hugging Face folder with optimum-intel; *reason* says why the hand-built graph does not do.

    Weights that are not asked for in int8 or int4 stay in float32.

    Raises :class:`ModelSourceError` when the extra is not installed or the conversion fails.
    """
    optimum = _import("optimum.intel", folder, reason)
    options: dict[str, Any] = {"export": True, "compile": False, "use_cache": True, "stateful": True}
    if precision in {"int8", "int4"}:
        grouping = {"bits": 8} if precision == "int8" else {"bits": 4, "sym": True, "group_size": int4_group_size}
        options["quantization_config"] = optimum.OVWeightQuantizationConfig(**grouping)
    else:
        options["load_in_8bit"] = False
    try:
        return optimum.OVModelForCausalLM.from_pretrained(folder, **options).model
    except Exception as error:  # the converter raises whatever torch, transformers or openvino raise
        raise ModelSourceError(f"{folder}: optimum-intel cannot convert it ({_first_line(error)}).") from error


def _import(name: str, folder: Path, reason: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"{folder}: {reason}; others are converted by optimum-intel: pip install 'enginehouse[export]'."
        raise ModelSourceError(msg) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
