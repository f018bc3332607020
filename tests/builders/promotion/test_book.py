"""The release book: numbers, stages, history that stays, what a rollback goes back to."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from enginehouse_builders.promotion.book import FILE_NAME, ReleaseBook
from enginehouse_builders.promotion.journal import Operation, Routing
from enginehouse_builders.promotion.lock import exclusive
from enginehouse_builders.promotion.records import Change, StageEvent, parse_stage
from enginehouse_contract.errors import ConfigurationError, PromotionError
from enginehouse_contract.release import release_of_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def book(tmp_path: Path) -> Iterator[ReleaseBook]:
    """An empty book."""
    with ReleaseBook(tmp_path) as book:
        yield book


def move(book: ReleaseBook, action: str, target: int) -> None:
    """Move production."""
    routing = Routing(target)
    pointed = book.stage("production")
    event = StageEvent("production", action, pointed.number if pointed else None, target, "me", why="because")
    book.commit(Operation("promote", "production", target, routing, routing, "me"), Change(event))


def test_a_build_with_the_same_settings_is_the_same_release(book: ReleaseBook, tmp_path: Path) -> None:
    """Another setting makes another release; numbers only grow."""
    first = book.add_release("sha256:a", tmp_path, "small", {"num_threads": "2"}, "me")
    again = book.add_release("sha256:a", tmp_path, "small", {"num_threads": "2"}, "you")
    other = book.add_release("sha256:a", tmp_path, "small", {"num_threads": "1"}, "me")

    assert first == again
    assert (first.name, other.name) == ("r1", "r2")
    assert first.model("tensorrt_llm") == "tensorrt_llm-r1"
    assert [release_of_model(model) for model in first.models] == [1] * 4
    assert [release_of_model(model) for model in ("tensorrt_llm", "x-r1", "ensemble-r0", "ensemble-rx")] == [None] * 4


def test_history_and_releases_cannot_be_changed(book: ReleaseBook, tmp_path: Path) -> None:
    """Not even with a database tool."""
    book.add_release("sha256:a", tmp_path, "small", {}, "me")
    move(book, "serve", 1)
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        for statement in ("DELETE FROM history", "UPDATE history SET who = 'x'", "DELETE FROM release"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                database.execute(statement)
    database.close()

    (event,) = book.history("production")
    assert (event.who, event.action, event.why, event.to_release) == ("me", "serve", "because", 1)
    assert book.history("staging") == []


def test_a_rollback_goes_back_along_the_path(book: ReleaseBook, tmp_path: Path) -> None:
    """After r1, r2, r3 and a rollback to r2 the one before is r1; what was rolled back is not gone back to."""
    for build in "abc":
        book.add_release(f"sha256:{build}", tmp_path, "small", {}, "me")
    assert book.previous_release("production") is None
    for action, target, expected in (
        ("serve", 1, None),
        ("promote", 2, 1),
        ("promote", 3, 2),
        ("rollback", 2, 1),
        ("rollback", 1, None),
        ("promote", 3, 1),
    ):
        move(book, action, target)
        previous = book.previous_release("production")
        assert (None if previous is None else previous.number) == expected


def test_order_is_that_of_writing_even_when_the_clock_goes_back(
    book: ReleaseBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest event is the last written, whatever its time says."""
    for build in "ab":
        book.add_release(f"sha256:{build}", tmp_path, "small", {}, "me")
    move(book, "serve", 1)
    monkeypatch.setattr("time.time", lambda: 0.0)
    move(book, "promote", 2)

    assert [event.to_release for event in book.history()] == [1, 2]
    assert book.history()[1].at.startswith("1970-01-01")


def test_unknown_releases_and_stages_are_refused(book: ReleaseBook, tmp_path: Path) -> None:
    """With what there is."""
    book.add_release("sha256:a", tmp_path, "small", {}, "me")
    with pytest.raises(ConfigurationError, match="there is no release r9; there are: r1"):
        book.find_release("r9")
    with pytest.raises(ConfigurationError, match="must be like r12; given newest"):
        book.find_release("newest")
    with pytest.raises(ConfigurationError, match="`stage` must be staging or production; given prod"):
        parse_stage("prod")


def test_a_damaged_book_is_said(tmp_path: Path) -> None:
    """A file that is no database is not touched."""
    (tmp_path / FILE_NAME).write_text("not a database, but long enough to look at" * 10)
    with pytest.raises(PromotionError, match="cannot be used"):
        ReleaseBook(tmp_path)


def test_one_change_at_a_time(tmp_path: Path) -> None:
    """The second is told who is at it, and may go on once the first is done."""
    with (
        exclusive(tmp_path, "enginehouse promote b"),
        pytest.raises(PromotionError, match=r"`enginehouse promote b` \(pid \d+\) is changing"),
        exclusive(tmp_path, "enginehouse rollback"),
    ):
        pass
    with exclusive(tmp_path, "enginehouse rollback"):
        assert (tmp_path / "promotion.lock").read_text().startswith("`enginehouse rollback`")
