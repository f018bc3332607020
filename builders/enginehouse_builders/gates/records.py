"""Where records of gates are kept: beside the builds, append-only, numbered, one file each.

``<home>/gates/<build id>/000001.json``: never inside the build, whose bytes its id vouches for. A number is taken by
linking a finished file to it, which fails where another run took it first; so a reader sees whole records only, and
the latest does not depend on clocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from enginehouse_builders.gates.record import GateRecord
from enginehouse_contract.errors import BuildError, BuildIntegrityError

_NAME: Final = re.compile(r"(\d{6,})\.json")


def records_dir(home: Path, build_id: str) -> Path:
    """Return the folder of a build's records."""
    return home / "gates" / build_id.replace(":", "-")


def write_record(home: Path, record: GateRecord) -> tuple[GateRecord, Path]:
    """Add a record; return it with its number, and its file.

    Raises :class:`BuildError` when it cannot be written.
    """
    folder = records_dir(home, record.build_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as scratch:
            number = max(_numbers(folder), default=0) + 1
            while True:
                numbered = dataclasses.replace(record, number=number)
                draft, path = Path(scratch, "record"), folder / f"{number:06}.json"
                draft.write_text(numbered.to_json(), encoding="utf-8")
                with contextlib.suppress(FileExistsError):
                    os.link(draft, path)
                    return numbered, path
                number += 1
                draft.unlink()
    except OSError as error:
        raise BuildError(f"the gates' record cannot be written to {folder} ({error.strerror or error}).") from error


def read_records(home: Path, build_id: str) -> list[GateRecord]:
    """Return a build's records, oldest first.

    Raises :class:`BuildIntegrityError` naming the first that is damaged.
    """
    folder = records_dir(home, build_id)
    return [_read(folder / f"{number:06}.json") for number in _numbers(folder)]


def latest_record(home: Path, build_id: str, host_kind: str) -> GateRecord | None:
    """Return the newest record of a build on hosts of this kind, or None where its gates never ran there.

    *host_kind* is ``describe_host().kind`` on the host that will serve. Raises :class:`BuildIntegrityError` for a
    damaged record, which could have been the one that failed.
    """
    of_kind = [record for record in read_records(home, build_id) if record.host_kind == host_kind]
    return of_kind[-1] if of_kind else None


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name)))  # noqa: PTH208 - names, not paths


def _read(path: Path) -> GateRecord:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildIntegrityError(f"{path} cannot be read ({error}); run the gates again.") from error
    return GateRecord.from_json(text, str(path))
