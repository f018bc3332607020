"""Architectures beyond the hand-built graph, converted by optimum-intel (the extra `export`, which brings torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

    import openvino as ov

    from enginehouse_builders.cpu.weights import WeightPrecision


def export_decoder(folder: Path, precision: WeightPrecision, reason: str) -> ov.Model:
    """Convert a Hugging Face folder with optimum-intel; *reason* says why the hand-built graph does not do.

    Raises :class:`ModelSourceError` when the extra is not installed or the conversion fails.
    """
    try:
        optimum = importlib.import_module("optimum.intel")
    except ImportError as error:
        msg = f"{folder}: {reason}; others are converted by optimum-intel: pip install 'enginehouse[export]'."
        raise ModelSourceError(msg) from error
    options: dict[str, Any] = {"export": True, "compile": False, "use_cache": True, "stateful": True}
    if precision in {"int8", "int4"}:
        bits = 8 if precision == "int8" else 4
        options["quantization_config"] = optimum.OVWeightQuantizationConfig(bits=bits)
    try:
        return optimum.OVModelForCausalLM.from_pretrained(folder, **options).model
    except Exception as error:  # the converter raises whatever torch, transformers or openvino raise
        msg = f"{folder}: optimum-intel cannot convert it ({type(error).__name__}: {error})."
        raise ModelSourceError(msg) from error
