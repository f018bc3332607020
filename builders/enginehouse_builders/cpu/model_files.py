"""Writing and checking OpenVINO models: the same graph gives the same bytes, and a full disk is noticed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

import openvino as ov
from openvino._offline_transformations import paged_attention_transformation

from enginehouse_contract.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

_GRAPH_BYTES: Final = 16 << 20  # room for what is written beside the weights


def write_model(model: ov.Model, path: Path, store_dir: Path) -> int:
    """Write a model, read it back, and return the bytes of its constants.

    A full disk does not stop OpenVINO's writer from returning, so space is asked for first and the file read after.
    Raises :class:`BuildError`.
    """
    path.parent.mkdir(exist_ok=True)
    num_bytes: int = sum(node.get_byte_size() for node in _name_by_order(model) if node.get_type_name() == "Constant")
    free = shutil.disk_usage(path.parent).free
    if free < num_bytes + _GRAPH_BYTES:
        needed = f"{(num_bytes + _GRAPH_BYTES) >> 20} MiB are needed in {store_dir}, {free >> 20} MiB are free"
        raise BuildError(f"there is no space for the build: {needed}; free some and build again.")
    try:
        ov.save_model(model, path, compress_to_fp16=False)
        ov.Core().read_model(path)
    except RuntimeError as error:
        raise BuildError(f"the model cannot be written to {store_dir} ({_last_line(error)}).") from error
    return num_bytes


def check_paged(path: Path) -> int:
    """Turn a written model's attention into paged attention, as the engine does; return the layers that have it.

    Raises :class:`BuildError` for a model whose attention stays as it was.
    """
    try:
        model = ov.Core().read_model(path)
        paged_attention_transformation(
            model,
            use_block_indices_inputs=False,
            use_score_outputs=False,
            allow_score_aggregation=False,
            allow_cache_rotation=False,
            allow_xattention=False,
            allow_adaptive_rkv=False,
            allow_qq_bias=False,
        )
    except RuntimeError as error:
        raise BuildError(f"the model cannot be served with paged attention ({_last_line(error)}).") from error
    num_layers: int = sum(node.get_type_name() == "PagedAttentionExtension" for node in model.get_ops())
    if num_layers == 0:
        raise BuildError("the model has no attention that can be paged; it cannot be served by this engine.")
    return num_layers


def _name_by_order(model: ov.Model) -> list[ov.Node]:
    """Name nodes by their place in the graph; a name that OpenVINO counts out differs from build to build."""
    nodes: list[ov.Node] = model.get_ordered_ops()
    for index, node in enumerate(nodes):
        if node.get_friendly_name() == node.get_name():
            node.set_friendly_name(f"{node.get_type_name()}_{index}")
    return nodes


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
