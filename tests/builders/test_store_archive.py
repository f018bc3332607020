"""Builds as tar files: the way out and back, and archives that must be refused."""

from __future__ import annotations

import io
import os
import tarfile
from typing import TYPE_CHECKING

import pytest
from tests.support.small_builds import write_build

from enginehouse_builders.store import find_build, folder_of, list_builds
from enginehouse_builders.store_archive import export_build, import_build
from enginehouse_contract.errors import BuildError, BuildIntegrityError, ConfigurationError
from enginehouse_contract.manifest import verify_build

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"config.json": b"{}", "openvino_model.bin": b"\x01" * 3000}


def silent(_stage: str, _share: float) -> None:
    """No progress."""


def repacked(archive: Path, change: dict[str, bytes | None], extra: list[tarfile.TarInfo] | None = None) -> Path:
    """Copy an archive with members (by the end of their names) changed or left out, and others added."""
    changed = archive.with_name("changed.tar")
    with tarfile.open(archive) as source, tarfile.open(changed, "w") as target:
        for member in source:
            stream = source.extractfile(member)
            assert stream is not None
            data: bytes | None = stream.read()
            for end, replacement in change.items():
                if member.name.endswith(end):
                    data = replacement
            if data is not None:
                member.size = len(data)
                target.addfile(member, io.BytesIO(data))
        for member in extra or []:
            target.addfile(member, io.BytesIO(b"\0" * member.size))
    return changed


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An exported build of two files."""
    folder = write_build(tmp_path / "store", files=FILES)
    path = tmp_path / "build.tar"
    export_build(find_build(tmp_path / "store", str(folder)), path, silent)
    return path


def test_a_build_comes_back_as_it_was(archive: Path, tmp_path: Path) -> None:
    """The other store gets the same files under the same id; a second import finds it there."""
    original = list_builds(tmp_path / "store")[0]
    build, was_there = import_build(archive, tmp_path / "other", silent)
    assert not was_there
    assert verify_build(build.build_dir) == original.manifest
    assert (build.build_dir / "openvino_model.bin").read_bytes() == FILES["openvino_model.bin"]
    assert import_build(archive, tmp_path / "other", silent) == (build, True)


def test_the_same_build_gives_the_same_archive(archive: Path, tmp_path: Path) -> None:
    """Neither the time nor the owner of files shows."""
    build = list_builds(tmp_path / "store")[0]
    os.utime(build.build_dir / "config.json", (1, 1))
    export_build(build, tmp_path / "again.tar", silent)
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.tar", "build.tar", "store"]


def test_a_damaged_build_is_not_exported(archive: Path, tmp_path: Path) -> None:
    """A changed byte is found before anything is written."""
    build = list_builds(tmp_path / "store")[0]
    (build.build_dir / "config.json").write_bytes(b"[]")
    with pytest.raises(BuildIntegrityError, match=r"config\.json"):
        export_build(build, archive.with_name("bad.tar"), silent)
    assert not archive.with_name("bad.tar").exists()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """A member of an archive that is up to no good."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (member("../outside"), "outside"),
        (member("/etc/outside"), "outside"),
        (member("FOLDER/../../outside"), "outside"),
        (member("FOLDER/a\\..\\outside"), "outside"),
        (member("FOLDER/link", tarfile.SYMTYPE, "/etc/passwd"), "link"),
        (member("FOLDER/link", tarfile.LNKTYPE, "/etc/passwd"), "link"),
        (member("FOLDER/pipe", tarfile.FIFOTYPE), "pipe"),
        (member("FOLDER/sub", tarfile.DIRTYPE), "sub"),
        (member("FOLDER/extra"), "extra is in the archive or in the manifest"),
        (member("FOLDER/config.json"), r"config\.json twice"),
        (member("elsewhere/extra"), "elsewhere"),
    ],
)
def test_members_that_no_build_has_are_refused(
    info: tarfile.TarInfo, message: str, archive: Path, tmp_path: Path
) -> None:
    """Paths outside, links, devices and files that the manifest does not name: nothing of the archive is kept."""
    folder = folder_of(tmp_path, list_builds(tmp_path / "store")[0].manifest.build_id).name
    info.name = info.name.replace("FOLDER", folder)
    with pytest.raises(BuildIntegrityError, match=message):
        import_build(repacked(archive, {}, [info]), tmp_path / "other", silent)
    assert list_builds(tmp_path / "other") == []
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"openvino_model.bin": b"\x01" * 2999 + b"\x02"}, "changed"),
        ({"openvino_model.bin": b"\x01" * 2999}, "truncated"),
        ({"openvino_model.bin": None}, "openvino_model.bin is in the archive or in the manifest"),
        ({"manifest.json": None}, r"no manifest\.json"),
        ({"manifest.json": b"{}"}, "format_version"),
        ({"manifest.json": b'{"format_version": 99}'}, "another Enginehouse"),
    ],
)
def test_archives_of_other_bytes_are_refused(
    change: dict[str, bytes | None], message: str, archive: Path, tmp_path: Path
) -> None:
    """A changed, shortened or missing file, and a manifest that is none: no build appears."""
    with pytest.raises(BuildIntegrityError, match=message):
        import_build(repacked(archive, change), tmp_path / "other", silent)
    assert list_builds(tmp_path / "other") == []
    assert [path.name for path in (tmp_path / "other").glob(".adding-*")] == []


def test_a_truncated_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    """Wherever the file ends early, the message says what it should be, and no build appears."""
    data = archive.read_bytes()
    for num_bytes in (0, 100, 700, len(data) // 2, 3000):
        archive.write_bytes(data[:num_bytes])
        with pytest.raises(
            (ConfigurationError, BuildIntegrityError, BuildError), match=r"build\.tar|cannot be written"
        ):
            import_build(archive, tmp_path / "other", silent)
        assert list_builds(tmp_path / "other") == []


@pytest.mark.usefixtures("archive")
def test_places_that_are_not_there_are_said(tmp_path: Path) -> None:
    """A missing file, a folder for a file, and a folder that is not there."""
    build = list_builds(tmp_path / "store")[0]
    with pytest.raises(ConfigurationError, match="not there"):
        import_build(tmp_path / "missing.tar", tmp_path / "other", silent)
    with pytest.raises(ConfigurationError, match="is a folder"):
        import_build(tmp_path, tmp_path / "other", silent)
    with pytest.raises(BuildError, match="is a folder"):
        export_build(build, tmp_path, silent)
    with pytest.raises(BuildError, match="cannot be written"):
        export_build(build, tmp_path / "nowhere" / "x.tar", silent)
