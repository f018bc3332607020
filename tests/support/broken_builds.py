"""A real build whose numbers are wrong: it is whole, it loads, it answers, and what it answers is garbage."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov

from enginehouse_builders.store import folder_of
from enginehouse_contract.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    WEIGHTS_FILE,
    FileRecord,
    read_manifest,
    sha256_of_file,
)

if TYPE_CHECKING:
    from pathlib import Path


def scramble_scales(build_dir: Path, store_dir: Path, *, seed: int = 0) -> Path:
    """Copy a quantized build into a store with the scales of every matrix shuffled among its rows; return its folder.

    Its digests are right: only its numbers are not. This is what a quantizer does that mixes up an axis.
    """
    manifest = read_manifest(build_dir)
    build_id = "sha256:" + hashlib.sha256(f"{manifest.build_id} {seed}".encode()).hexdigest()
    folder = folder_of(store_dir, build_id)
    shutil.copytree(build_dir, folder, ignore=shutil.ignore_patterns(MODEL_FILE, WEIGHTS_FILE, MANIFEST_FILE))
    model = ov.Core().read_model(build_dir / MODEL_FILE)
    assert _scramble(model, np.random.default_rng(seed)) > 0, "the build has scales to scramble"
    ov.save_model(model, folder / MODEL_FILE, compress_to_fp16=False)
    files = {name: FileRecord((folder / name).stat().st_size, sha256_of_file(folder / name)) for name in manifest.files}
    broken = dataclasses.replace(manifest, build_id=build_id, model_name=f"{manifest.model_name}-broken", files=files)
    (folder / MANIFEST_FILE).write_text(broken.to_json(), encoding="utf-8")
    return folder


def _scramble(model: ov.Model, rng: np.random.Generator) -> int:
    """Shuffle the constants that multiply what was widened from 8 or 4 bits; return how many."""
    num_scrambled = 0
    for node in model.get_ops():
        if node.get_type_name() != "Multiply":
            continue
        scale, source = node.input_value(1).get_node(), node.input_value(0).get_node()
        while source.get_type_name() in {"Convert", "Subtract"}:
            source = source.input_value(0).get_node()
        if scale.get_type_name() != "Constant" or source.get_type_name() != "Constant" or scale.shape[0] == 1:
            continue
        shuffled = ov.opset16.constant(rng.permutation(scale.data, axis=0))
        node.input(1).replace_source_output(shuffled.output(0))
        num_scrambled += 1
    return num_scrambled
