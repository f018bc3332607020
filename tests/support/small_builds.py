"""Builds of a few bytes, for tests of what moves and counts them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from enginehouse_builders.store import folder_of
from enginehouse_contract.manifest import MANIFEST_FILE, BuildLimits, FileRecord, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_build(
    store_dir: Path, *, name: str = "small", files: Mapping[str, bytes], build_id: str | None = None
) -> Path:
    """Write a build of these files into a store, and return its folder; the id is a digest of them unless given."""
    records = {path: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items()}
    build_id = build_id or "sha256:" + hashlib.sha256(repr((name, sorted(records.items()))).encode()).hexdigest()
    manifest = Manifest(
        build_id=build_id,
        target="cpu",
        model_name=name,
        source={"kind": "gguf", "name": name, "sha256": "0" * 64},
        weight_precision="f32",
        kv_precision="f32",
        limits=BuildLimits(4, 64, 64, 64),
        tool_versions={},
        tokenizer_sha256="0" * 64,
        chat_template_sha256=None,
        files=records,
        created_at="2026-01-01T00:00:00+00:00",
    )
    folder = folder_of(store_dir, build_id)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return folder
