"""Where a build came from, as an in-toto statement with SLSA's provenance predicate: ``provenance.json`` in the build.

Formats: in-toto Statement v1 (in-toto/attestation, spec/v1/statement.md) and SLSA provenance v1 (slsa.dev).
It holds nothing of one run (times, host names), so that the same build has the same bytes wherever it was made; the
optional ``metadata`` of SLSA's ``runDetails`` is left out, and the manifest's ``created_at`` says when.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from enginehouse_contract.errors import BuildIntegrityError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from enginehouse_contract.manifest import FileRecord, Manifest

PROVENANCE_FILE: Final = "provenance.json"
_STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
_BUILD_TYPE: Final = "urn:enginehouse:build:v1"
_BUILDER_ID: Final = "urn:enginehouse:builder"


def build_id_of(inputs: Mapping[str, Any]) -> str:
    """Return the id of a build: the digest of all inputs that decide its bytes, as canonical JSON."""
    return "sha256:" + hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def statement(
    *,
    inputs: Mapping[str, Any],
    spec: Mapping[str, Any],
    materials: Mapping[str, str],
    files: Mapping[str, FileRecord],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return the statement.

    Args:
        inputs: What the build id is the digest of (:func:`build_id_of`).
        spec: The resolved spec that was asked for.
        materials: What was read (the model, calibration data): name -> SHA-256.
        files: The build's files, without this one and the manifest.
        versions: The tools that made it.
    """
    return {
        "_type": _STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": record.sha256}} for name, record in sorted(files.items())],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"spec": dict(spec)},
                "internalParameters": {"inputs": dict(inputs)},
                "resolvedDependencies": [
                    {"name": name, "digest": {"sha256": sha256}} for name, sha256 in sorted(materials.items())
                ],
            },
            "runDetails": {"builder": {"id": _BUILDER_ID, "version": dict(versions)}},
        },
    }


def read_provenance(build_dir: Path) -> dict[str, Any] | None:
    """Return a build's statement; None where it has none. Raises :class:`BuildIntegrityError` for an unreadable one."""
    path = build_dir / PROVENANCE_FILE
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildIntegrityError(
            f"{path} cannot be read ({error}); rebuild, or take the build from elsewhere."
        ) from error
    if not isinstance(value, dict) or value.get("predicateType") != _PREDICATE_TYPE:
        raise BuildIntegrityError(f"{path} is not a statement of SLSA provenance v1.")
    return value


def check_provenance(build_dir: Path, manifest: Manifest) -> bool:
    """Check that a build's id is the digest of the inputs its provenance states, and its files are the subjects.

    Returns whether there was a statement to check. Raises :class:`BuildIntegrityError` saying what differs.
    """
    found = read_provenance(build_dir)
    if found is None:
        return False
    try:
        inputs = found["predicate"]["buildDefinition"]["internalParameters"]["inputs"]
        subjects = {one["name"]: one["digest"]["sha256"] for one in found["subject"]}
    except (KeyError, TypeError) as error:
        raise BuildIntegrityError(f"{build_dir / PROVENANCE_FILE} lacks {error}; it was changed.") from error
    if (stated := build_id_of(inputs)) != manifest.build_id:
        msg = (
            f"{build_dir}: the inputs in {PROVENANCE_FILE} give the id {stated}, the manifest says {manifest.build_id}."
        )
        raise BuildIntegrityError(msg)
    recorded = {name: record.sha256 for name, record in manifest.files.items() if name != PROVENANCE_FILE}
    if subjects != recorded:
        differing = sorted(
            name for name in subjects.keys() | recorded.keys() if subjects.get(name) != recorded.get(name)
        )
        msg = f"{build_dir}: {differing[0]} is not what {PROVENANCE_FILE} says was built."
        raise BuildIntegrityError(msg)
    return True
