"""Builds in words: what one is, where it came from, and how two differ."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from enginehouse_contract.manifest import Manifest

_WIDTH: Final = 12
_NOT_COMPARED: Final = ("files", "created_at")


def size_of(num_bytes: int) -> str:
    """Return bytes in the unit that suits them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def total_bytes(manifest: Manifest) -> int:
    """Return the bytes of a build's files."""
    return sum(record.num_bytes for record in manifest.files.values())


def describe(manifest: Manifest, provenance: Mapping[str, Any] | None, path: str, protected: str | None) -> str:
    """Return a build as paragraphs: what it is, where it came from, its files."""
    limits = dataclasses.asdict(manifest.limits)
    rows = [
        ("id", manifest.build_id),
        ("path", path),
        ("target", manifest.target),
        ("made", manifest.created_at),
        ("weights", manifest.weight_precision),
        ("KV cache", manifest.kv_precision),
        ("limits", ", ".join(f"{name} {value}" for name, value in limits.items())),
        ("source", f"{manifest.source.get('kind', '?')} {manifest.source.get('name', '')}"),
        ("", f"SHA-256 {manifest.source.get('sha256', '?')}"),
        ("tokenizer", f"SHA-256 {manifest.tokenizer_sha256}"),
        ("template", f"SHA-256 {manifest.chat_template_sha256}" if manifest.chat_template_sha256 else "none"),
        ("made by", ", ".join(f"{name} {version}" for name, version in sorted(manifest.tool_versions.items()))),
    ]
    if protected is not None:
        rows.append(("kept", protected))
    lines = [manifest.model_name, *(f"  {name:<{_WIDTH}}{value}" for name, value in rows)]
    lines += ["", "files", *_files(manifest), "", "provenance", *_provenance(provenance)]
    return "\n".join(lines)


def differences(first: Manifest, second: Manifest) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two builds, by dotted name; a missing value is None."""
    left, right = (dict(_flat(_comparable(one))) for one in (first, second))
    return {
        name: (left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }


def _comparable(manifest: Manifest) -> dict[str, Any]:
    found = {name: value for name, value in dataclasses.asdict(manifest).items() if name not in _NOT_COMPARED}
    found["files"] = {
        name: f"{record.num_bytes} bytes, SHA-256 {record.sha256[:16]}" for name, record in manifest.files.items()
    }
    return found


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}/{name}" if prefix else name)
    else:
        yield prefix, value


def _files(manifest: Manifest) -> list[str]:
    width = max((len(name) for name in manifest.files), default=0)
    return [
        f"  {name:<{width}}  {size_of(record.num_bytes):>9}  {record.sha256[:16]}"
        for name, record in sorted(manifest.files.items())
    ]


def _provenance(statement: Mapping[str, Any] | None) -> list[str]:
    if statement is None:
        return ["  none: this build was made before builds recorded it, or elsewhere."]
    definition = statement["predicate"]["buildDefinition"]
    rows = [
        ("statement", f"{statement['_type']}, {statement['predicateType']}"),
        ("built as", definition["buildType"]),
        *(
            ("from", f"{one['name']}, SHA-256 {one['digest']['sha256']}")
            for one in definition.get("resolvedDependencies", [])
        ),
        *(
            (f"{name}", f"{value}")
            for name, value in _flat(definition["externalParameters"].get("spec", {}))
            if value not in (None, (), [])
        ),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return [f"  {name:<{width}}{value}" for name, value in rows]
