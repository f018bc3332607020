"""Records of gates: whole, numbered, found by the kind of host."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from enginehouse_builders.gates import GATES, GateRecord, GateResult, latest_record, read_records, write_record
from enginehouse_builders.gates.records import records_dir
from enginehouse_contract.errors import BuildError, BuildIntegrityError

if TYPE_CHECKING:
    from pathlib import Path

BUILD_ID = "sha256:" + "a" * 64


def make_record(*statuses: str, host_kind: str = "cpu-a-x2") -> GateRecord:
    """Return a record whose gates have these statuses, the last for all that are left."""
    every = [*statuses, *[statuses[-1]] * (len(GATES) - len(statuses))]
    results = tuple(
        GateResult(gate, status, f"it {status}", {"ratio": 0.5}, {"max_ratio": 1.0})  # type: ignore[arg-type]
        for gate, status in zip(GATES, every, strict=True)
    )
    return GateRecord(BUILD_ID, "small", None, host_kind, {"cpu": "a"}, "2026-01-01T00:00:00+00:00", {}, results)


def test_a_record_comes_back_the_same(tmp_path: Path) -> None:
    """What is written is what is read, with its number."""
    written, path = write_record(tmp_path, make_record("passed"))
    assert path.name == "000001.json"
    assert written.number == 1
    assert read_records(tmp_path, BUILD_ID) == [written]


def test_a_record_passes_when_every_gate_passed_and_only_cost_may_be_skipped() -> None:
    """A gate that failed, was skipped or never ran keeps a build out; an unknown cost does not."""
    passed = make_record("passed")
    assert passed.passed
    assert not passed.why_not
    last = GateResult("cost", "skipped", "no rate")
    assert replace(passed, results=(*passed.results[:-1], last)).passed
    for broken in (
        make_record("failed"),
        make_record("passed", "skipped"),
        replace(passed, results=passed.results[1:]),
    ):
        assert not broken.passed
        assert broken.why_not


def test_the_latest_record_of_a_kind_of_host_is_found(tmp_path: Path) -> None:
    """Records of other kinds of host do not count; without any there is none."""
    assert latest_record(tmp_path, BUILD_ID, "cpu-a-x2") is None
    write_record(tmp_path, make_record("passed"))
    write_record(tmp_path, make_record("failed"))
    write_record(tmp_path, make_record("passed", host_kind="gpu-b-x1"))
    latest = latest_record(tmp_path, BUILD_ID, "cpu-a-x2")
    assert latest is not None
    assert (latest.number, latest.passed) == (2, False)
    assert latest_record(tmp_path, BUILD_ID, "gpu-c-x1") is None


def test_records_written_at_once_are_all_kept(tmp_path: Path) -> None:
    """Eight writers get eight numbers and no scratch is left."""
    writers = [threading.Thread(target=write_record, args=(tmp_path, make_record("passed"))) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [record.number for record in read_records(tmp_path, BUILD_ID)] == list(range(1, 9))
    assert not list(records_dir(tmp_path, BUILD_ID).glob(".*"))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format_version": 1, "results": 3}', '{"format_version": 9}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    """It could have been the one that failed, so nobody reads past it."""
    _, path = write_record(tmp_path, make_record("passed"))
    path.write_text(text)
    with pytest.raises(BuildIntegrityError, match=path.name):
        latest_record(tmp_path, BUILD_ID, "cpu-a-x2")


def test_a_record_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    """A home that is a file is an error of ours, not a traceback."""
    home = tmp_path / "home"
    home.write_text("")
    with pytest.raises(BuildError, match="gates"):
        write_record(home, make_record("passed"))
