"""The store: builds, one folder each, published by rename and never changed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginehouse_contract.errors import BuildError, BuildIntegrityError, ConfigurationError
from enginehouse_contract.manifest import MANIFEST_FILE, Manifest, read_manifest, verify_build

if TYPE_CHECKING:
    from collections.abc import Iterator

STORE_VERSION: Final = 1
"""Raised when an older Enginehouse could not work on the store any more."""

WORK_PREFIX: Final = ".building-"
"""Folders of builds at work."""

_NUM_ID_CHARS: Final = 16
_SCRATCH_PREFIX: Final = ".adding-"
_LOCK_FILE: Final = ".lock"
_VERSION_FILE: Final = "store.json"
_NUM_SHOWN: Final = 8  # builds in a message
_NUM_SHOWN_CHARS: Final = len("sha256:") + 12


@dataclass(frozen=True, slots=True)
class StoredBuild:
    """A finished build and where it lies."""

    build_dir: Path
    manifest: Manifest


def folder_of(store_dir: Path, build_id: str) -> Path:
    """Return the folder that a build has or will have."""
    return store_dir / build_id.replace(":", "-")[: len("sha256-") + _NUM_ID_CHARS]


def build_folders(store_dir: Path) -> list[Path]:
    """Return the folders of finished builds, damaged ones included, by name."""
    check_version(store_dir)
    return sorted(path.parent for path in store_dir.glob(f"*/{MANIFEST_FILE}") if not path.parent.name.startswith("."))


def list_builds(store_dir: Path) -> list[StoredBuild]:
    """Return the finished builds, newest first; folders that are none are passed over.

    Raises :class:`ConfigurationError` for a store that a newer Enginehouse wrote.
    """
    found = []
    for folder in build_folders(store_dir):
        with contextlib.suppress(BuildIntegrityError):
            found.append(StoredBuild(folder, read_manifest(folder)))
    return sorted(found, key=lambda build: build.manifest.created_at, reverse=True)


def newest_build(store_dir: Path) -> StoredBuild:
    """Return the newest build; raise :class:`ConfigurationError` when there is none."""
    builds = list_builds(store_dir)
    if not builds:
        raise ConfigurationError(f"there is no build in {store_dir}; make one with `enginehouse build MODEL`.")
    return builds[0]


def find_build(store_dir: Path, reference: str) -> StoredBuild:
    """Return the build that *reference* names: a folder, a build id or the start of one, or a model name.

    A name means its newest build. Raises :class:`ConfigurationError` when none or several match, with what there is,
    and :class:`BuildIntegrityError` for a folder that is no build.
    """
    path = Path(reference)
    if reference and path.is_dir():
        return StoredBuild(path.absolute(), read_manifest(path))
    builds = list_builds(store_dir)
    start = "sha256:" + reference.removeprefix("sha256").lstrip(":-")
    matches = [build for build in builds if build.manifest.build_id.startswith(start)]
    named = [build for build in builds if build.manifest.model_name == reference]
    if named or len(matches) == 1:
        return (named or matches)[0]
    if matches:
        ids = ", ".join(build.manifest.build_id[:_NUM_SHOWN_CHARS] for build in matches[:_NUM_SHOWN])
        raise ConfigurationError(f"`{reference}` could be any of {ids}; give more of the id.")
    known = ", ".join(
        f"{build.manifest.model_name} ({build.manifest.build_id[:_NUM_SHOWN_CHARS]})" for build in builds[:_NUM_SHOWN]
    )
    raise ConfigurationError(f"no build is called `{reference}`; in {store_dir}: {known or 'none yet'}.")


@contextmanager
def publishing(store_dir: Path, build_id: str) -> Iterator[Path]:
    """Yield a scratch folder that becomes the build when the block ends without an error.

    Of two builders of one build the first to finish wins; the other's work is dropped, since the bytes are the same. A
    builder that is killed leaves a scratch folder that no command sees; the next build on that store removes it.

    Raises :class:`BuildError` when the folder cannot be written.
    """
    with store_errors(store_dir), _scratch_folder(store_dir) as scratch:
        yield scratch
        publish(scratch, folder_of(store_dir, build_id))


@contextmanager
def store_errors(store_dir: Path) -> Iterator[None]:
    """Make the store, marked with its format, and turn what the system says while it is written into our words.

    Raises :class:`BuildError` for what cannot be written, :class:`ConfigurationError` for a newer store.
    """
    try:
        check_version(store_dir)
        store_dir.mkdir(parents=True, exist_ok=True)
        if not (store_dir / _VERSION_FILE).exists():
            text = json.dumps({"store_version": STORE_VERSION}) + "\n"
            (store_dir / _VERSION_FILE).write_text(text, encoding="utf-8")
        yield
    except OSError as error:
        msg = f"the build cannot be written to {store_dir} ({error.strerror or error})"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise BuildError(f"{msg}; free some space and build again.") from error
        raise BuildError(f"{msg}.") from error


def check_version(store_dir: Path) -> None:
    """Refuse a store that a newer Enginehouse wrote, by :class:`ConfigurationError`; one without a mark is of today."""
    try:
        version = json.loads((store_dir / _VERSION_FILE).read_text(encoding="utf-8"))["store_version"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if not isinstance(version, int) or version > STORE_VERSION:
        problem = f"was written by a newer Enginehouse: its format is {version}, this one knows {STORE_VERSION}"
        hint = "Upgrade Enginehouse, or choose another folder with ENGINEHOUSE_HOME."
        raise ConfigurationError(f"the store {store_dir} {problem}. {hint}")


def publish(scratch: Path, folder: Path) -> None:
    """Make a finished folder the build, in one step; a build that is there and sound stays, the other is dropped."""
    scratch.chmod(0o755)
    if folder.exists() and not is_sound(folder):
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=folder.parent) as aside:
            folder.rename(Path(aside, folder.name))
    try:
        scratch.rename(folder)
    except OSError as error:
        if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
            raise


def adopt_build(build_dir: Path, store_dir: Path) -> StoredBuild:
    """Move a finished build that was made elsewhere on this host into the store, its files checked by size.

    Raises :class:`BuildIntegrityError` for a damaged one, :class:`BuildError` when it cannot be moved.
    """
    manifest = verify_build(build_dir, digests=False)
    with publishing(store_dir, manifest.build_id) as scratch:
        for path in sorted(build_dir.iterdir()):
            shutil.move(path, scratch / path.name)
    return StoredBuild(folder_of(store_dir, manifest.build_id), manifest)


def is_sound(build_dir: Path) -> bool:
    """Return whether a folder holds a finished build whose files have the sizes that its manifest says."""
    try:
        verify_build(build_dir, digests=False)
    except BuildIntegrityError:
        return False
    return True


@contextmanager
def _scratch_folder(store_dir: Path) -> Iterator[Path]:
    """A new folder, locked while in use: the lock is gone when its process is, however that ended."""
    with (store_dir / _LOCK_FILE).open("w") as store_lock:
        fcntl.flock(store_lock, fcntl.LOCK_EX)
        for folder in store_dir.glob(f"{_SCRATCH_PREFIX}*"):
            _remove_if_abandoned(folder)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=store_dir))
        descriptor = os.open(scratch, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(descriptor)


def _remove_if_abandoned(scratch: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # its owner may be removing it
        descriptor = os.open(scratch, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(scratch, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
