"""The store: builds, one folder each, published by rename and never changed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginehouse_contract.errors import BuildError, BuildIntegrityError, ConfigurationError
from enginehouse_contract.manifest import MANIFEST_FILE, Manifest, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUM_ID_CHARS: Final = 16
_SCRATCH_PREFIX: Final = ".building-"


@dataclass(frozen=True, slots=True)
class StoredBuild:
    """A finished build and where it lies."""

    build_dir: Path
    manifest: Manifest


def folder_of(store_dir: Path, build_id: str) -> Path:
    """Return the folder that a build has or will have."""
    return store_dir / build_id.replace(":", "-")[: len("sha256-") + _NUM_ID_CHARS]


def list_builds(store_dir: Path) -> list[StoredBuild]:
    """Return the finished builds, newest first; folders that are none are passed over."""
    found = []
    for folder in store_dir.glob(f"*/{MANIFEST_FILE}"):
        if not folder.parent.name.startswith(_SCRATCH_PREFIX):
            with contextlib.suppress(BuildIntegrityError):
                found.append(StoredBuild(folder.parent, read_manifest(folder.parent)))
    return sorted(found, key=lambda build: build.manifest.created_at, reverse=True)


def newest_build(store_dir: Path) -> StoredBuild:
    """Return the newest build; raise :class:`ConfigurationError` when there is none."""
    builds = list_builds(store_dir)
    if not builds:
        raise ConfigurationError(f"there is no build in {store_dir}; make one with `enginehouse build MODEL`.")
    return builds[0]


def find_build(store_dir: Path, reference: str) -> StoredBuild:
    """Return the build that *reference* names: a folder, a build id or the start of one, or a model name.

    Raises :class:`ConfigurationError` when none or several match, with what there is; a name means its newest build.
    """
    path = Path(reference)
    if (path / MANIFEST_FILE).is_file():
        return StoredBuild(path.absolute(), read_manifest(path))
    builds = list_builds(store_dir)
    wanted = reference if reference.startswith("sha256:") else f"sha256:{reference}"
    matches = [build for build in builds if build.manifest.build_id.startswith(wanted)]
    if len(matches) > 1:
        ids = ", ".join(build.manifest.build_id[:19] for build in matches)
        raise ConfigurationError(f"`{reference}` could be any of {ids}; give more of the id.")
    named = [build for build in builds if build.manifest.model_name == reference]
    if not matches and not named:
        known = ", ".join(f"{build.manifest.model_name} ({build.manifest.build_id[:19]})" for build in builds[:8])
        raise ConfigurationError(f"no build is called `{reference}`; in {store_dir}: {known or 'none yet'}.")
    return (matches or named)[0]


@contextmanager
def publishing(store_dir: Path, build_id: str) -> Iterator[Path]:
    """Yield a scratch folder that becomes the build when the block ends without an error.

    Of two builders of one build the first to finish wins; the other's work is dropped, since the bytes are the same. A
    builder that is killed leaves a scratch folder that no command sees; the next build on that store removes it.
    """
    store_dir.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(store_dir)
    scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH_PREFIX}{os.getpid()}-", dir=store_dir))
    try:
        yield scratch
        scratch.chmod(0o755)
        with contextlib.suppress(FileExistsError):
            _rename(scratch, folder_of(store_dir, build_id))
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            free = shutil.disk_usage(store_dir).free
            raise BuildError(
                f"no space left in {store_dir} ({free >> 20} MiB free); free some and build again."
            ) from error
        raise BuildError(f"the build cannot be written to {store_dir} ({error}).") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _rename(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError as error:
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY}:
            raise FileExistsError from error
        raise


def _remove_abandoned(store_dir: Path) -> None:
    """Remove scratch folders whose builder is gone."""
    for scratch in store_dir.glob(f"{_SCRATCH_PREFIX}*"):
        owner = scratch.name.removeprefix(_SCRATCH_PREFIX).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(scratch, ignore_errors=True)
