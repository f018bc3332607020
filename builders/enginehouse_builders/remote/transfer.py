"""Moving a build to a remote store and back, resumably, with every byte checked.

Up: objects first, the manifest last. Down: into a hidden folder of the store, each file checked against its SHA-256,
the manifest last, then one rename. Killed at any point, the next run goes on with the bytes that are there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from enginehouse_builders.store import StoredBuild, folder_of
from enginehouse_contract.errors import BuildError, BuildIntegrityError, ConfigurationError
from enginehouse_contract.manifest import MANIFEST_FILE, FileRecord, Manifest, sha256_of_file, verify_build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from enginehouse_builders.remote.location import RemoteStore

    Progress = Callable[[str, float], None]

_SCRATCH_PREFIX: Final = ".pulling-"
_PART_SUFFIX: Final = ".part"
_NUM_KEY_CHARS: Final = 16  # of a file's SHA-256 in its key: 64 bits tell the files of one build apart
_CHUNK_BYTES: Final = 16 << 20
_BUILD_ID: Final = re.compile(r"sha256:[0-9a-f]{64}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_NUM_SHOWN: Final = 8
_NUM_SHOWN_CHARS: Final = len("sha256:") + 12


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did: where the build is now, and how much of it had to be sent."""

    url: str
    manifest: Manifest
    num_files_sent: int
    num_bytes_sent: int

    @property
    def was_there(self) -> bool:
        """Whether the store held the whole build already."""
        return self.num_files_sent == 0


@dataclass(frozen=True, slots=True)
class Pulled:
    """A build that is in the local store now; ``was_there`` when nothing had to be fetched."""

    build: StoredBuild
    num_bytes_fetched: int
    was_there: bool


def push_build(build_dir: Path, store: RemoteStore, progress: Progress) -> Pushed:
    """Copy a build to a remote store; objects that are there with their full size are not sent again.

    Raises :class:`BuildIntegrityError` when the build is not what its manifest says; what the store's methods raise.
    """
    progress("checking", 0.0)
    manifest = verify_build(build_dir)
    folder = folder_of(Path(), manifest.build_id).name
    url = store.url_of(folder)
    if _is_whole(store, folder, manifest.build_id):
        return Pushed(url, manifest, 0, 0)
    missing = _missing(store, folder, manifest)
    num_bytes = sum(record.num_bytes for record in missing.values())
    num_sent = 0
    for name, record in missing.items():
        progress(f"sending {name}", num_sent / max(num_bytes, 1))
        store.upload(build_dir / name, _key(folder, name, record))
        num_sent += record.num_bytes
    if still := sorted(_missing(store, folder, manifest)):
        msg = f"{url}: {still[0]} did not arrive whole; push the build again."
        raise BuildIntegrityError(msg)
    store.upload(build_dir / MANIFEST_FILE, f"{folder}/{MANIFEST_FILE}")
    return Pushed(url, manifest, len(missing) + 1, num_bytes)


def list_remote(store: RemoteStore) -> list[Manifest]:
    """Return the finished builds of a remote store, newest first; folders that hold none are passed over."""
    found = []
    for folder in store.names():
        if folder.startswith("sha256-"):
            with suppress(BuildIntegrityError):
                found.append(_read_manifest(store, folder))
    return sorted((manifest for manifest in found if manifest), key=lambda each: each.created_at, reverse=True)


def find_remote(store: RemoteStore, reference: str) -> Manifest:
    """Return the manifest of the build that *reference* names: its id, the start of one, its folder, or a model name.

    A name means its newest build. Raises :class:`ConfigurationError` when none or several match, with what there is,
    :class:`BuildIntegrityError` for one whose manifest is damaged.
    """
    start = "sha256:" + reference.removeprefix("sha256").lstrip(":-")
    if _BUILD_ID.fullmatch(start) or PurePosixPath(reference).name.startswith("sha256-"):
        folder = folder_of(Path(), start).name
        manifest = _read_manifest(store, folder)
        if manifest is not None and manifest.build_id.startswith(start):
            return manifest
    manifests = list_remote(store)
    named = [manifest for manifest in manifests if manifest.model_name == reference]
    matches = [manifest for manifest in manifests if manifest.build_id.startswith(start)] if reference else []
    if named or len(matches) == 1:
        return (named or matches)[0]
    if matches:
        ids = ", ".join(manifest.build_id[:_NUM_SHOWN_CHARS] for manifest in matches[:_NUM_SHOWN])
        raise ConfigurationError(f"`{reference}` could be any of {ids}; give more of the id.")
    known = ", ".join(
        f"{manifest.model_name} ({manifest.build_id[:_NUM_SHOWN_CHARS]})" for manifest in manifests[:_NUM_SHOWN]
    )
    raise ConfigurationError(f"no build is called `{reference}` at {store.url}; there: {known or 'none'}.")


def pull_build(store: RemoteStore, reference: str, store_dir: Path, progress: Progress) -> Pulled:
    """Bring a build into the local store and return it; one that is there and sound is only checked.

    Raises :class:`BuildIntegrityError` naming the first object that is missing, truncated or changed,
    :class:`ConfigurationError` when *reference* names no build, :class:`BuildError` when it cannot be written here.
    """
    progress("looking", 0.0)
    manifest = find_remote(store, reference)
    target = folder_of(store_dir, manifest.build_id)
    try:
        with _locked_scratch_folder(store_dir / f"{_SCRATCH_PREFIX}{target.name}") as scratch:
            if (local := _sound_build(target, manifest.build_id)) is not None:
                return Pulled(local, 0, was_there=True)
            num_bytes = _fetch_all(store, manifest, scratch, progress)
            (scratch / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
            verify_build(scratch, digests=False)
            _publish(scratch, target)
    except OSError as error:
        msg = f"the build cannot be written to {store_dir} ({error.strerror or error})"
        hint = "free some space and pull again, it goes on where it stopped" if error.errno == errno.ENOSPC else ""
        raise BuildError(f"{msg}; {hint}." if hint else f"{msg}.") from error
    return Pulled(StoredBuild(target, manifest), num_bytes, was_there=False)


def _fetch_all(store: RemoteStore, manifest: Manifest, scratch: Path, progress: Progress) -> int:
    folder = folder_of(Path(), manifest.build_id).name
    sizes = store.sizes(folder)
    for name, record in manifest.files.items():
        key = _key(folder, name, record)
        if sizes.get(key) != record.num_bytes:
            found = f"has {sizes[key]} of {record.num_bytes} bytes" if key in sizes else "is missing"
            raise BuildIntegrityError(f"{store.url_of(key)} {found}; push the build again.")
    total = sum(record.num_bytes for record in manifest.files.values())
    _require_space(scratch, total)
    num_done = num_fetched = 0
    for name, record in manifest.files.items():
        for num_bytes in _fetch(store, _key(folder, name, record), record, scratch / name):
            num_fetched += num_bytes
            progress(f"fetching {name}", (num_done + num_fetched) / max(total, 1))
    return num_fetched


def _fetch(store: RemoteStore, key: str, record: FileRecord, path: Path) -> Iterator[int]:
    """Fetch what is missing of one object, yielding the size of each piece; the finished file has its digest."""
    part = path.with_name(path.name + _PART_SUFFIX)
    part.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # from a run that was ended
        path.rename(part)
    yield from _append(store, key, record, part)
    if sha256_of_file(part) != record.sha256:
        part.unlink()  # what an ended run left may be of other bytes, and a connection may lie once
        yield from _append(store, key, record, part)
    if (sha256 := sha256_of_file(part)) != record.sha256:
        part.unlink()
        msg = (
            f"{store.url_of(key)}: SHA-256 {sha256}, the manifest says {record.sha256}; the object was changed. Delete "
            "the object and push the build again."
        )
        raise BuildIntegrityError(msg)
    part.rename(path)


def _append(store: RemoteStore, key: str, record: FileRecord, part: Path) -> Iterator[int]:
    with part.open("ab") as stream:
        while (start := stream.tell()) < record.num_bytes:
            piece = store.read_range(key, start, min(start + _CHUNK_BYTES, record.num_bytes))
            if not piece:
                raise BuildIntegrityError(f"{store.url_of(key)} ends at byte {start} of {record.num_bytes}.")
            stream.write(piece)
            yield len(piece)
        stream.flush()
        os.fsync(stream.fileno())


def _is_whole(store: RemoteStore, folder: str, build_id: str) -> bool:
    try:
        manifest = _read_manifest(store, folder)
    except BuildIntegrityError:
        return False
    return manifest is not None and manifest.build_id == build_id and not _missing(store, folder, manifest)


def _missing(store: RemoteStore, folder: str, manifest: Manifest) -> dict[str, FileRecord]:
    """The files whose objects are not there, or not whole."""
    sizes = store.sizes(folder)
    return {
        name: record
        for name, record in manifest.files.items()
        if sizes.get(_key(folder, name, record)) != record.num_bytes
    }


def _read_manifest(store: RemoteStore, folder: str) -> Manifest | None:
    """The manifest of one folder, checked as what a stranger may have written; None where there is none."""
    key = f"{folder}/{MANIFEST_FILE}"
    data = store.read(key)
    if data is None:
        return None
    where = store.url_of(key)
    manifest = Manifest.from_json(data.decode("utf-8", "replace"), where)
    if not _BUILD_ID.fullmatch(str(manifest.build_id)) or folder_of(Path(), manifest.build_id).name != folder:
        raise BuildIntegrityError(f"{where} calls itself build {manifest.build_id!r}; it is not that of its folder.")
    for name, record in manifest.files.items():
        path = PurePosixPath(name)
        is_inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name
        if not is_inside or name == MANIFEST_FILE or "\0" in name:
            raise BuildIntegrityError(f"{where} names a file outside its build: {name!r}.")
        if not _SHA256.fullmatch(str(record.sha256)) or not isinstance(record.num_bytes, int) or record.num_bytes < 0:
            raise BuildIntegrityError(f"{where}: the record of {name} is damaged.")
    return manifest


def _key(folder: str, name: str, record: FileRecord) -> str:
    return f"{folder}/files/{record.sha256[:_NUM_KEY_CHARS]}/{name}"


def _sound_build(folder: Path, build_id: str) -> StoredBuild | None:
    with suppress(BuildIntegrityError):
        manifest = verify_build(folder)
        if manifest.build_id == build_id:
            return StoredBuild(folder, manifest)
    return None


def _require_space(scratch: Path, num_bytes: int) -> None:
    there = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
    free = shutil.disk_usage(scratch).free
    if num_bytes - there > free:
        raise BuildError(f"{num_bytes - there} bytes are needed in {scratch.parent}, {free} are free; free some space.")


@contextmanager
def _locked_scratch_folder(folder: Path) -> Iterator[Path]:
    """The folder that holds what was fetched of one build; a second process waits until the first is done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # published meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists() and folder.stat().st_ino == os.fstat(descriptor).st_ino:
                yield folder
                with suppress(OSError):
                    folder.rmdir()  # empty where the build was there already
                return
        finally:
            os.close(descriptor)


def _publish(scratch: Path, target: Path) -> None:
    if target.exists():  # damaged: it was checked before anything was fetched
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=target.parent) as aside:
            target.rename(Path(aside, target.name))
            scratch.rename(target)
    else:
        scratch.rename(target)
