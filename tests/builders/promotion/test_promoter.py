"""Promotion on a server in memory: what each change leaves, killed at every moment, failing at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.live_servers import Fuse, KilledError, MemoryServer, MortalBook

from enginehouse_builders.promotion import promoter as promoter_module
from enginehouse_builders.promotion.book import ReleaseBook
from enginehouse_builders.promotion.journal import Operation, Routing, Step
from enginehouse_builders.promotion.promoter import (
    Promoter,
    current_routing,
    end_operation_without_server,
    require_agreement,
)
from enginehouse_builders.promotion.records import Change, StageEvent
from enginehouse_contract.errors import EngineUnavailableError, PromotionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HALF = {"share": 0.5, "by": "request"}

OPERATIONS: dict[str, dict[str, Any]] = {
    "promote": {"action": "promote", "target": 2, "after": Routing(2)},
    "promote, memory for one": {"action": "promote", "target": 2, "after": Routing(2), "swap": "unload_first"},
    "promote and keep": {"action": "promote", "target": 2, "after": Routing(2), "keep_loaded": True},
    "to staging": {"action": "stage", "stage": "staging", "target": 2, "after": Routing(1)},
    "start a canary": {"action": "canary_start", "target": 2, "after": Routing(1, canary=2, **HALF)},
    "rollback": {"action": "rollback", "target": 3, "after": Routing(3)},
    "end a canary": {"action": "canary_end", "target": 1, "after": Routing(1)},
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promoter_module, "_SETTLE_S", 0.0)
    monkeypatch.setattr(promoter_module, "_POLL_S", 0.0)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[ReleaseBook]:
    """A book with three releases of which r1 is in production, served since the start."""
    with ReleaseBook(tmp_path) as book:
        fill(book, tmp_path)
        yield book


def fill(book: ReleaseBook, home: Path) -> None:
    """Write three releases, the first in production."""
    for number in (1, 2, 3):
        book.add_release(f"sha256:{number}", home / f"build-{number}", "small", {}, "me")
    routing = Routing(1)
    event = StageEvent("production", "serve", None, 1, "me")
    book.commit(Operation("promote", "production", 1, routing, routing, "me"), Change(event))
    book.restart(book.release(1))


def make(book: ReleaseBook, kind: str, server: MemoryServer) -> Operation:
    """Return one of the operations, from what the book says; a canary that is to end is begun first."""
    if kind == "end a canary":
        Promoter(book, server).run(make(book, "start a canary", server))
        server.log.clear()
    return Operation(**{"stage": "production", "before": current_routing(book), "who": "me", **OPERATIONS[kind]})


def audit(book: ReleaseBook, server: MemoryServer) -> None:
    """Nothing is left over: the server answers by the book, holds what the book says, and that is what is needed."""
    routing = current_routing(book)
    assert book.unfinished() is None
    assert server.served().matches(routing)
    staging = book.stage("staging")
    needed = {*routing.releases, *({staging.number} if staging else ())}
    kept = {number for number, is_kept in book.loaded().items() if is_kept}
    assert server.held == needed | kept
    assert set(book.loaded()) == server.held
    assert server.published >= server.held
    require_agreement(book, server)


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_change_does_what_it_says(book: ReleaseBook, kind: str) -> None:
    """The server answers by the new routing, the stage moved (or not), and only what is needed stays loaded."""
    server = MemoryServer(1)
    operation = make(book, kind, server)
    outcome = Promoter(book, server).run(operation)

    audit(book, server)
    assert current_routing(book) == operation.after
    moved = book.stage(operation.stage)
    assert moved is not None
    assert moved.number == (1 if operation.action == "canary_start" else operation.target)
    event = book.history()[-1]
    assert (event.to_release, event.who, event.stage) == (operation.target, "me", operation.stage)
    assert outcome.load_s == (None if operation.action == "canary_end" else 2.5)
    assert (outcome.gap_s is not None) == (operation.swap == "unload_first")
    assert server.held == {*operation.after.releases, operation.target} | ({1} if operation.keep_loaded else set())


def test_the_old_release_answers_until_the_new_one_was_checked(book: ReleaseBook) -> None:
    """Load, check, switch, then unload: in this order."""
    server = MemoryServer(1)
    Promoter(book, server).run(make(book, "promote", server))

    assert server.log == ["publish r2", "load r2", "check r2", "point", "route", "unload r1", "retract r1"]


def test_with_memory_for_one_the_old_release_goes_first(book: ReleaseBook) -> None:
    """Unload, load, check, switch."""
    server = MemoryServer(1)
    Promoter(book, server).run(make(book, "promote, memory for one", server))

    assert server.log == ["publish r2", "unload r1", "retract r1", "load r2", "check r2", "point", "route"]


def count_moments(home: Path, kind: str) -> int:
    """Return at how many moments a kill may fall."""
    with MortalBook(home, fuse := Fuse()) as book:
        fill(book, home)
        server = MemoryServer(1)
        operation = make(book, kind, server)
        server.fuse, fuse.num_passed = fuse, 0
        Promoter(book, server).run(operation)
    return fuse.num_passed


@pytest.mark.parametrize("kind", OPERATIONS)
def test_killed_at_any_moment_the_next_command_completes_or_undoes(tmp_path: Path, kind: str) -> None:
    """Whatever a kill leaves, recovery ends it, says so, and nothing is left over; twice is as good as once."""
    endings = set()
    for moment in range(count_moments(tmp_path / "whole", kind)):
        home = tmp_path / str(moment)
        with MortalBook(home, fuse := Fuse()) as book:
            fill(book, home)
            server = MemoryServer(1)
            operation = make(book, kind, server)
            num_events = len(book.history())
            fuse.num_passed, fuse.at, server.fuse = 0, moment, fuse
            with pytest.raises(KilledError):
                Promoter(book, server).run(operation)
        server.fuse = Fuse()
        with ReleaseBook(home) as book:
            was_begun = book.unfinished() is not None
            said = Promoter(book, server).recover()
            audit(book, server)
            assert (said is not None) == was_begun
            is_completed = len(book.history()) == num_events + 1
            assert current_routing(book) == (operation.after if is_completed else operation.before)
            if said is not None:
                assert ("completed" if is_completed else "undone") in said
            endings.add(is_completed)
            assert Promoter(book, server).recover() is None
    assert endings == {True, False}


@pytest.mark.parametrize("kind", ["promote", "promote, memory for one", "start a canary"])
def test_killed_again_while_recovering(tmp_path: Path, kind: str) -> None:
    """A recovery that is killed itself is ended by the next one."""
    num_moments = count_moments(tmp_path / "whole", kind)
    for first in range(0, num_moments, 3):
        for second in range(0, 12, 2):
            home = tmp_path / f"{first}-{second}"
            with MortalBook(home, fuse := Fuse()) as book:
                fill(book, home)
                server = MemoryServer(1)
                operation = make(book, kind, server)
                fuse.num_passed, fuse.at, server.fuse = 0, first, fuse
                with pytest.raises(KilledError):
                    Promoter(book, server).run(operation)
                fuse.num_passed, fuse.at = 0, second
                try:
                    Promoter(book, server).recover()
                except KilledError:
                    fuse.at = None
                    Promoter(book, server).recover()
                fuse.at = None
                audit(book, server)


@pytest.mark.parametrize("kind", [kind for kind in OPERATIONS if kind != "end a canary"])
@pytest.mark.parametrize("fault", ["broken", "mute"])
def test_a_release_that_fails_leaves_the_old_one_serving(book: ReleaseBook, kind: str, fault: str) -> None:
    """It does not load, or does not answer: an error, and everything is as it was."""
    server = MemoryServer(1)
    operation = make(book, kind, server)
    getattr(server, fault).add(operation.target)
    with pytest.raises(PromotionError, match=f"r{operation.target} does not"):
        Promoter(book, server).run(operation)

    audit(book, server)
    assert current_routing(book) == Routing(1)
    assert len(book.history()) == 1


def test_a_switch_that_fails_half_way_is_switched_back(book: ReleaseBook) -> None:
    """Some names moved, the front door did not: all go back."""
    server = MemoryServer(1)
    server.switch_fails = 1
    with pytest.raises(PromotionError, match="did not follow"):
        Promoter(book, server).run(make(book, "promote", server))

    audit(book, server)
    assert server.stable == 1


def test_a_switch_that_cannot_be_completed_after_a_kill_is_undone(book: ReleaseBook) -> None:
    """Recovery tries the way forward first, then goes back, and says why."""
    server = MemoryServer(1)
    operation = book.advance(book.begin(make(book, "promote", server)), Step.SWITCHING)
    server.published.add(2)
    server.held.add(2)
    book.set_loaded(book.release(2))
    server.switch_fails = 1
    said = Promoter(book, server).recover()

    audit(book, server)
    assert said is not None
    assert "could not be completed" in said
    assert operation.step == Step.SWITCHING


def test_a_server_that_is_gone_leaves_the_journal_open(book: ReleaseBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say what is served then; once a server starts, the stage decides."""
    server = MemoryServer(1)

    def is_gone(*_: object) -> None:
        raise EngineUnavailableError("gone")

    monkeypatch.setattr(server, "check", is_gone)
    with pytest.raises(EngineUnavailableError):
        Promoter(book, server).run(make(book, "promote", server))

    assert book.unfinished() is not None
    said = end_operation_without_server(book)
    assert said is not None
    assert "undone" in said
    assert book.unfinished() is None
    assert current_routing(book) == Routing(1)


def test_requests_of_the_old_release_end_before_it_is_unloaded(book: ReleaseBook) -> None:
    """Unloading waits for the last open request."""
    server = MemoryServer(1)
    server.open_requests[1] = [3, 2, 1]
    outcome = Promoter(book, server).run(make(book, "promote", server))

    assert server.open_requests[1] == []
    assert outcome.unloaded == [1]


def test_a_release_that_does_not_drain_stays_and_the_next_change_unloads_it(book: ReleaseBook) -> None:
    """The time limit ends the waiting, not the requests."""
    server = MemoryServer(1)
    server.open_requests[1] = [1] * 50
    outcome = Promoter(book, server, drain_timeout_s=0.0).run(make(book, "promote", server))
    assert outcome.still_open == {1: 1}
    assert server.held == {1, 2}

    server.open_requests.clear()
    Promoter(book, server).run(make(book, "rollback", server))
    audit(book, server)
    assert server.held == {3}


def test_a_kept_release_is_kept_until_another_change(book: ReleaseBook) -> None:
    """One release at most is kept: the one that answered before."""
    server = MemoryServer(1)
    Promoter(book, server).run(make(book, "promote and keep", server))
    assert server.held == {1, 2}

    Promoter(book, server).run(make(book, "rollback", server))
    assert server.held == {3}


def test_what_was_done_by_hand_is_seen(book: ReleaseBook) -> None:
    """A switch or a load that the book does not know stops a promotion, with what to do."""
    server = MemoryServer(1)
    server.held.add(3)
    with pytest.raises(PromotionError, match="`tensorrt_llm-r3` was loaded by hand"):
        require_agreement(book, server)

    server.stable = 3
    with pytest.raises(PromotionError, match=r"production is r1, but .*rollback --to r1"):
        require_agreement(book, server)
