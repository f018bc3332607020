"""Finding builds in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from enginehouse_builders.store import find_build, folder_of, list_builds, newest_build, publishing
from enginehouse_contract.errors import BuildError, BuildIntegrityError, ConfigurationError
from enginehouse_contract.manifest import MANIFEST_FILE, BuildLimits, Manifest

if TYPE_CHECKING:
    from pathlib import Path

IDS = ["sha256:" + digits * 16 for digits in ("aaaa", "aaab", "beef")]


def publish(store: Path, build_id: str, name: str, created_at: str) -> Path:
    """Publish a build that is only a manifest."""
    manifest = Manifest(
        build_id=build_id,
        target="cpu",
        model_name=name,
        source={},
        weight_precision="f32",
        kv_precision="u8",
        limits=BuildLimits(1, 1, 2, 1),
        tool_versions={},
        tokenizer_sha256="",
        chat_template_sha256=None,
        files={},
        created_at=created_at,
    )
    with publishing(store, build_id) as scratch:
        (scratch / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return folder_of(store, build_id)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three builds of two names, the second the newest, beside things that are no builds."""
    folder = tmp_path / "store"
    publish(folder, IDS[0], "tiny", "2026-01-01T00:00:00+00:00")
    publish(folder, IDS[1], "tiny", "2026-01-03T00:00:00+00:00")
    publish(folder, IDS[2], "large", "2026-01-02T00:00:00+00:00")
    (folder / "notes").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / MANIFEST_FILE).write_text("{", encoding="utf-8")
    (folder / ".adding-abc").mkdir()
    return folder


def test_builds_are_listed_newest_first(store: Path, tmp_path: Path) -> None:
    """Only finished, readable builds are listed; a store that is not there is empty."""
    assert [build.manifest.build_id for build in list_builds(store)] == [IDS[1], IDS[2], IDS[0]]
    assert newest_build(store).manifest.build_id == IDS[1]
    assert list_builds(tmp_path / "nowhere") == []
    with pytest.raises(ConfigurationError, match="enginehouse build MODEL"):
        newest_build(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        (IDS[0], IDS[0]),
        (IDS[2][:12], IDS[2]),
        ("beef", IDS[2]),
        ("sha256-beef", IDS[2]),
        ("aaaaaaaa", IDS[0]),
        ("tiny", IDS[1]),
        ("large", IDS[2]),
    ],
)
def test_builds_are_found_by_id_prefix_or_name(reference: str, found: str, store: Path) -> None:
    """A full id, a unique start of one with or without its prefix, or a name, whose newest build it means."""
    assert find_build(store, reference).manifest.build_id == found


def test_builds_are_found_by_folder(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is taken wherever it lies, relative ones included."""
    folder = folder_of(store, IDS[0])
    monkeypatch.chdir(store)
    assert find_build(store.parent, folder.name).build_dir == folder
    assert find_build(store, str(folder)).manifest.build_id == IDS[0]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("aaa", r"could be any of sha256:aaabaaab.*sha256:aaaaaaaa.*more of the id"),
        ("", "could be any of"),
        ("medium", r"no build is called `medium`; in .*tiny \(sha256:aaab.*large"),
        ("sha256:ffff", "no build is called `sha256:ffff`"),
    ],
)
def test_references_that_name_no_one_build_are_refused(reference: str, message: str, store: Path) -> None:
    """Unknown and ambiguous references are refused with what there is."""
    with pytest.raises(ConfigurationError, match=message):
        find_build(store, reference)


def test_a_folder_that_is_no_build_is_said(store: Path) -> None:
    """A folder without a manifest, or with a damaged one, is called what it is."""
    for name in ("notes", "broken"):
        with pytest.raises(BuildIntegrityError, match=name):
            find_build(store, str(store / name))


def test_the_first_of_two_builders_wins(tmp_path: Path) -> None:
    """A build that is there is not replaced by the same build finished later."""
    store = tmp_path / "store"
    with publishing(store, IDS[0]) as scratch:
        first = publish(store, IDS[0], "first", "2026-01-01T00:00:00+00:00")
        (scratch / MANIFEST_FILE).write_text((first / MANIFEST_FILE).read_text(encoding="utf-8"), encoding="utf-8")
        (scratch / "late").write_text("", encoding="utf-8")
    assert not (folder_of(store, IDS[0]) / "late").exists()
    assert [build.manifest.model_name for build in list_builds(store)] == ["first"]


def test_only_abandoned_scratch_folders_are_removed(tmp_path: Path) -> None:
    """Scratch folders of builders at work stay while others build; those nobody holds go."""
    store = tmp_path / "store"
    abandoned = store / ".adding-abandoned"
    abandoned.mkdir(parents=True)
    with publishing(store, IDS[0]) as at_work:
        publish(store, IDS[1], "tiny", "2026-01-01T00:00:00+00:00")
        assert at_work.is_dir()
        assert not abandoned.exists()
        (at_work / "file").write_text("", encoding="utf-8")
    assert folder_of(store, IDS[0]).is_dir()


def test_a_read_only_store_is_said(tmp_path: Path) -> None:
    """A store that cannot be made is refused with the reason."""
    (tmp_path / "store").write_text("", encoding="utf-8")
    with pytest.raises(BuildError, match="cannot be written to"), publishing(tmp_path / "store", IDS[0]):
        pass
