"""Quantization that looks at activations: AWQ and GPTQ by NNCF (the extra `export`), over calibration text.

Lin et al. 2023 (AWQ); Frantar et al. 2022 (GPTQ). Embedding and head stay int8. The scales are sums of floating-point
activations of this host's kernels: another kind of CPU may round them otherwise.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from openvino import opset16 as ops
from tokenizers import Tokenizer

from enginehouse_builders.cpu.inputs import nncf_version
from enginehouse_contract.errors import BuildError, ConfigurationError, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import ModuleType

    import openvino as ov

_NUM_SPREAD_DIMENSIONS: Final = 5  # batch, key heads, queries that share one, length, size
_LENGTH_DIMENSION: Final = 3


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

    _spread_explicitly(model, is_explicit=True)
    try:
        quantized = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT4_ASYM,
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
    _spread_explicitly(quantized, is_explicit=False)
    return quantized


def _spread_explicitly(model: ov.Model, *, is_explicit: bool) -> None:
    """Say 1 for the length to which shared heads are spread, where the graph says 0.

    With 0 the plugin fuses the spreading into its attention; it fails in the pieces of the graph that GPTQ runs.
    """
    old, new = (0, 1) if is_explicit else (1, 0)
    for node in model.get_ordered_ops():
        target = node.input_value(1).get_node() if node.get_type_name() == "Broadcast" else None
        if target is None or target.get_type_name() != "Concat" or target.get_input_size() != _NUM_SPREAD_DIMENSIONS:
            continue
        length = target.input_value(_LENGTH_DIMENSION).get_node()
        if length.get_type_name() == "Constant" and length.data.tolist() == [old]:
            stated = ops.constant(np.array([new], np.int64))
            target.input(_LENGTH_DIMENSION).replace_source_output(stated.output(0))


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
