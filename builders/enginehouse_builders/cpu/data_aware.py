"""Quantization that looks at activations: AWQ and GPTQ by NNCF (the extra `export`), over calibration text.

Lin et al. 2023 (AWQ); Frantar et al. 2022 (GPTQ). Embedding and head stay int8. The scales are sums of floating-point
activations of this host's kernels: another kind of CPU may round them otherwise.
"""

from __future__ import annotations

import importlib
import logging
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from enginehouse_contract.errors import BuildError, ConfigurationError, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    import openvino as ov


def nncf_version() -> str:
    """Return NNCF's version; raise :class:`BuildError` saying what to install when it is not there."""
    try:
        return metadata.version("nncf")
    except metadata.PackageNotFoundError as error:
        msg = (
            "AWQ and GPTQ weights are made by NNCF, which is not installed: pip install 'enginehouse[export]'; "
            "or build with int4 or int8 weights, which need no data."
        )
        raise BuildError(msg) from error


def quantize(
    model: ov.Model,
    precision: str,
    group_size: int,
    samples: Sequence[str],
    max_sample_tokens: int,
    tokenizer_file: Path,
    progress: Callable[[float], None],
) -> ov.Model:
    """Return *model*, a stateful decoder with floating-point weights, with matrices in 4 bits.

    Raises :class:`BuildError` when NNCF is not installed or cannot do it, :class:`ConfigurationError` for samples
    without tokens.
    """
    nncf_version()
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokens = [tokenizer.encode(text).ids[:max_sample_tokens] for text in samples]
    inputs = [_inputs(ids) for ids in tokens if ids]
    if not inputs:
        raise ConfigurationError(refusal("quantization.calibration.data", "gives no tokens with this tokenizer"))
    nncf = _import_nncf()
    num_seen = 0

    def seen(sample: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_seen
        num_seen += 1
        progress(min(num_seen / (2 * len(inputs)), 0.5))
        return sample

    try:
        return nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT4_SYM,
            ratio=1.0,
            group_size=group_size,
            dataset=nncf.Dataset(inputs, seen),
            subset_size=len(inputs),
            awq=precision == "int4_awq",
            gptq=precision == "int4_gptq",
        )
    except Exception as error:  # NNCF raises whatever a graph makes it raise
        words = " ".join(str(error).split()) or type(error).__name__
        raise BuildError(
            f"NNCF cannot quantize this model to {precision} ({words}); try int4 or int8 weights."
        ) from error


def _inputs(ids: list[int]) -> dict[str, Any]:
    row = np.array([ids], np.int64)
    return {
        "input_ids": row,
        "attention_mask": np.ones_like(row),
        "position_ids": np.arange(row.shape[1], dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }


def _import_nncf() -> ModuleType:
    nncf = importlib.import_module("nncf")
    nncf.set_log_level(logging.ERROR)
    return nncf
