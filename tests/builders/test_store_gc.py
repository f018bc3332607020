"""What garbage collection removes, and what it must not."""

from __future__ import annotations

import fcntl
import json
import os
from typing import TYPE_CHECKING

import pytest
from tests.support.small_builds import write_build

from enginehouse_builders.store import STORE_VERSION, check_version, list_builds, publishing
from enginehouse_builders.store_gc import find_garbage, remove
from enginehouse_contract.errors import ConfigurationError
from enginehouse_contract.manifest import MANIFEST_FILE, read_manifest

if TYPE_CHECKING:
    from pathlib import Path


def build(store: Path, name: str, minute: int) -> str:
    """Write a build made at that minute; return its id."""
    folder = write_build(store, name=name, files={"config.json": b"%d" % minute})
    text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
    (folder / MANIFEST_FILE).write_text(text.replace("T00:00:00", f"T00:{minute:02}:00"), encoding="utf-8")
    return read_manifest(folder).build_id


def test_old_unprotected_builds_go(tmp_path: Path) -> None:
    """The newest of each name stay, and the protected ones whatever their age."""
    old, middle, new = (build(tmp_path, "a", minute) for minute in (1, 2, 3))
    other = build(tmp_path, "b", 1)
    garbage = find_garbage(tmp_path, {old}, 1)
    assert [one.manifest.build_id for one in garbage.builds] == [middle]
    assert garbage.num_bytes > 0
    remove(garbage)
    assert {one.manifest.build_id for one in list_builds(tmp_path)} == {old, new, other}
    assert find_garbage(tmp_path, {old}, 1).builds == ()
    assert len(find_garbage(tmp_path, set(), 0).builds) == 3


def test_folders_of_builds_at_work_stay(tmp_path: Path) -> None:
    """A folder that a process holds is no garbage; one that nobody holds is."""
    held, dead = tmp_path / ".building-held", tmp_path / ".building-dead"
    held.mkdir()
    dead.mkdir()
    descriptor = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        garbage = find_garbage(tmp_path, set(), 1)
        assert garbage.leftovers == (dead,)
        remove(garbage)
    finally:
        os.close(descriptor)
    assert held.is_dir()
    assert not dead.exists()


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """Neither read nor written: the message names both versions and what to do."""
    with publishing(tmp_path, "sha256:" + "a" * 64) as scratch:
        (scratch / "x").write_text("", encoding="utf-8")
    mark = tmp_path / "store.json"
    assert json.loads(mark.read_text(encoding="utf-8")) == {"store_version": STORE_VERSION}
    check_version(tmp_path)
    mark.write_text(json.dumps({"store_version": STORE_VERSION + 1}), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"newer Enginehouse: its format is 2, this one knows 1.*Upgrade"):
        list_builds(tmp_path)
    with pytest.raises(ConfigurationError, match="newer Enginehouse"), publishing(tmp_path, "sha256:" + "b" * 64):
        pass
