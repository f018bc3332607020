"""From a build's decoder to the graph the runner runs: paged attention, wanted rows only, sampling outputs.

A build holds a stateful decoder (``input_ids``, ``position_ids``, one KV state per layer, ``logits``), as made by our
builder, by ``optimum-intel`` or by OpenVINO GenAI's GGUF reader. Three changes make it serve many sequences at once:

1. OpenVINO's own transformation turns attention with state into paged attention over caches given as inputs.
2. Only the rows named by the input ``logit_rows`` go through the head, the largest product of a small model.
3. The ``top_k`` largest logits and the log of the sum of exponentials become outputs, so that the host rarely reads a
   row of the whole vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import openvino as ov
from openvino import opset16 as ops
from openvino._offline_transformations import paged_attention_transformation

from enginehouse_contract.errors import BuildIntegrityError

if TYPE_CHECKING:
    from pathlib import Path

CACHE_PREFIXES: Final = ("key_cache.", "value_cache.")
STEP_INPUTS: Final = (
    "input_ids",  # [tokens]
    "position_ids",  # [tokens]
    "past_lens",  # [sequences]
    "subsequence_begins",  # [sequences + 1], into tokens
    "block_indices",  # [blocks of all sequences]
    "block_indices_begins",  # [sequences + 1], into block_indices
    "max_context_len",  # scalar
    "logit_rows",  # [rows], into tokens
)
SAMPLING_OUTPUTS: Final = (
    "logits",  # [rows, vocab]
    "top_values",  # [rows, min(top_k, vocab)], descending
    "top_ids",  # as top_values
    "log_sum_exp",  # [rows]
)
_STATEFUL_INPUTS: Final = {"input_ids", "position_ids"}


def read_paged_decoder(model_path: Path, top_k: int) -> ov.Model:
    """Read the decoder at *model_path* and return it as a paged graph.

    Its inputs are :data:`STEP_INPUTS` and the caches, its outputs :data:`SAMPLING_OUTPUTS`, in that order.

    Raises:
        BuildIntegrityError: The file cannot be read, or is not a decoder with KV state.
    """
    try:
        model = ov.Core().read_model(model_path)
    except RuntimeError as error:
        msg = f"{model_path} is not a readable OpenVINO model ({_last_line(error)}); rebuild it."
        raise BuildIntegrityError(msg) from error
    _check_is_stateful_decoder(model, model_path)
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        msg = f"{model_path}: attention cannot be paged ({_last_line(error)}); this engine cannot serve the model."
        raise BuildIntegrityError(msg) from error
    _keep_wanted_rows(model, model_path)
    _add_sampling_outputs(model, top_k)
    if (names := _input_names(model)) != set(STEP_INPUTS):
        msg = f"{model_path} has inputs this engine does not know: {sorted(names ^ set(STEP_INPUTS))}."
        raise BuildIntegrityError(msg)
    return model


def _check_is_stateful_decoder(model: ov.Model, model_path: Path) -> None:
    missing = [f"input `{name}`" for name in sorted(_STATEFUL_INPUTS - _input_names(model))]
    if not any("logits" in output.get_names() for output in model.outputs):
        missing.append("output `logits`")
    if not model.get_variables():
        missing.append("KV state")
    if missing:
        msg = f"{model_path} is not a decoder this engine can serve: no {', no '.join(missing)}. Rebuild it."
        raise BuildIntegrityError(msg)


def _input_names(model: ov.Model) -> set[str]:
    names = {port.get_any_name() for port in model.inputs}
    return {name for name in names if not name.startswith(CACHE_PREFIXES)}


def _keep_wanted_rows(model: ov.Model, model_path: Path) -> None:
    node = model.output("logits").get_node()
    while node.get_type_name() != "MatMul":
        if not node.get_input_size():
            msg = f"{model_path}: `logits` do not come from a matrix product; this engine cannot serve the model."
            raise BuildIntegrityError(msg)
        node = node.input_value(0).get_node()
    rows = ops.parameter([-1], np.int64, name="logit_rows")
    rows.output(0).get_tensor().set_names({"logit_rows"})
    hidden = node.input(0)
    hidden.replace_source_output(ops.gather(hidden.get_source_output(), rows, ops.constant(0, np.int64)).output(0))
    model.add_parameters([rows])


def _add_sampling_outputs(model: ov.Model, top_k: int) -> None:
    result = model.output("logits").get_node()
    logits = ops.squeeze(result.input_value(0), ops.constant([1], np.int64))  # [rows, 1, vocab] before
    vocab_size = logits.get_output_partial_shape(0)[1].get_length()
    top = ops.topk(logits, ops.constant(min(top_k, vocab_size), np.int64), -1, "max", "value", "i32")
    largest = ops.slice(
        top.output(0), *(ops.constant([number], np.int64) for number in (0, 1, 1, 1))
    )  # start, stop, step, axis
    sum_exp = ops.reduce_sum(ops.exp(ops.subtract(logits, largest)), ops.constant([1], np.int64), keep_dims=True)
    log_sum_exp = ops.squeeze(ops.add(ops.log(sum_exp), largest), ops.constant([1], np.int64))
    outputs = (logits.output(0), top.output(0), top.output(1), log_sum_exp.output(0))
    result.input_value(0).get_tensor().set_names(set())
    model.remove_result(result)
    for name, output in zip(SAMPLING_OUTPUTS, outputs, strict=True):
        output.get_tensor().set_names({name})
        model.add_results([ops.result(output)])
    model.validate_nodes_and_infer_types()


def _last_line(error: RuntimeError) -> str:
    """The end of an OpenVINO message: what went wrong, after where in its sources."""
    return str(error).strip().splitlines()[-1].strip()
