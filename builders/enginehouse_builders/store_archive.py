"""One build as one tar file, for a host that no network joins: written from a verified build, read with suspicion."""

from __future__ import annotations

import errno
import re
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from enginehouse_builders.provenance import check_provenance
from enginehouse_builders.store import StoredBuild, folder_of, is_sound, publishing
from enginehouse_contract.errors import BuildError, BuildIntegrityError, ConfigurationError
from enginehouse_contract.manifest import MANIFEST_FILE, Manifest, read_manifest, verify_build

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[str, float], None]

_BUILD_ID: Final = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_MANIFEST_BYTES: Final = 16 << 20
_CHUNK_BYTES: Final = 1 << 20


def export_build(build: StoredBuild, archive: Path, progress: Progress) -> int:
    """Write a build into a tar file, every digest checked first, and return the file's bytes.

    The same build gives the same archive: times, owners and order are fixed. The file appears whole or not at all.
    Raises :class:`BuildIntegrityError` for a damaged build, :class:`BuildError` when the file cannot be written.
    """
    progress("checking", 0.0)
    manifest = verify_build(build.build_dir)
    folder = folder_of(Path(), manifest.build_id).name
    names = [MANIFEST_FILE, *sorted(manifest.files)]
    if archive.is_dir():
        raise BuildError(f"{archive} is a folder; give the name of a file, such as {archive / folder}.tar.")
    try:
        with tempfile.TemporaryDirectory(prefix=".exporting-", dir=archive.absolute().parent) as scratch:
            draft = Path(scratch, "archive")
            with tarfile.open(draft, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for index, name in enumerate(names):
                    progress("writing", index / len(names))
                    tar.add(build.build_dir / name, f"{folder}/{name}", recursive=False, filter=_anonymous)
            draft.replace(archive)
    except OSError as error:
        raise BuildError(f"{archive} cannot be written ({error.strerror or error}).") from error
    progress("done", 1.0)
    return archive.stat().st_size


def import_build(archive: Path, store_dir: Path, progress: Progress) -> tuple[StoredBuild, bool]:
    """Bring a build from a tar file into the store; return it, and whether it was there before.

    Nothing but the files that the manifest names is read, to places within a scratch folder; the build appears when the
    digest of every file, and the id that its provenance gives, were checked. Raises :class:`BuildIntegrityError` for an
    archive that holds anything else, :class:`ConfigurationError` for a file that is no archive.
    """
    progress("reading", 0.0)
    try:
        with tarfile.open(archive, "r:") as tar:
            manifest, members = _contents(archive, tar)
            target = folder_of(store_dir, manifest.build_id)
            if is_sound(target):
                return StoredBuild(target, read_manifest(target)), True
            with publishing(store_dir, manifest.build_id) as scratch:
                for index, (name, member) in enumerate(members.items()):
                    progress("unpacking", 0.9 * index / len(members))
                    _unpack(tar, member, scratch / name)
                progress("checking", 0.9)
                verify_build(scratch)
                check_provenance(scratch, manifest)
    except tarfile.TarError as error:
        msg = (
            f"{archive} is not a whole tar file of a build ({error}); export it again with `enginehouse builds export`."
        )
        raise ConfigurationError(msg) from error
    except FileNotFoundError as error:
        raise ConfigurationError(f"{archive} is not there.") from error
    except IsADirectoryError as error:
        raise ConfigurationError(f"{archive} is a folder; give a file made by `enginehouse builds export`.") from error
    progress("done", 1.0)
    return StoredBuild(target, manifest), False


def _contents(archive: Path, tar: tarfile.TarFile) -> tuple[Manifest, dict[str, tarfile.TarInfo]]:
    """The manifest, and the members by their path in the build; whatever the manifest does not name is refused."""
    members: dict[str, tarfile.TarInfo] = {}
    folders = set()
    for member in tar:
        path = PurePosixPath(member.name)
        is_plain = member.isreg() and not path.is_absolute() and ".." not in path.parts and len(path.parts) > 1
        if not is_plain or "\\" in member.name:
            msg = f"{archive} holds `{member.name}`, which no build does (a link, a folder or a path outside); refused."
            raise BuildIntegrityError(msg)
        name = str(PurePosixPath(*path.parts[1:]))
        if name in members:
            raise BuildIntegrityError(f"{archive} holds {name} twice; refused.")
        folders.add(path.parts[0])
        members[name] = member
    first = members.get(MANIFEST_FILE)
    stream = tar.extractfile(first) if first is not None and first.size <= _MAX_MANIFEST_BYTES else None
    if stream is None:
        raise BuildIntegrityError(f"{archive} has no {MANIFEST_FILE}; it is not an exported build.")
    manifest = Manifest.from_json(stream.read().decode("utf-8", "replace"), f"{archive}:{MANIFEST_FILE}")
    if not _BUILD_ID.fullmatch(manifest.build_id) or folders != {folder_of(Path(), manifest.build_id).name}:
        raise BuildIntegrityError(
            f"{archive} holds the folder {', '.join(sorted(folders))} for {manifest.build_id}; refused."
        )
    if strays := sorted(members.keys() ^ (manifest.files.keys() | {MANIFEST_FILE})):
        raise BuildIntegrityError(f"{archive}: {strays[0]} is in the archive or in the manifest, not in both; refused.")
    return manifest, members


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None, "only plain files are unpacked"
    with path.open("xb") as stream:
        while chunk := source.read(_CHUNK_BYTES):
            stream.write(chunk)
    if path.stat().st_size != member.size:
        raise OSError(errno.EIO, "the archive ends early")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
