"""Changing what a running server answers from, step by step, each step journalled before the next.

The order is the protocol of facts measured on Triton 2.51: publish by rename, load beside the old release (or in its
place where memory does not hold both), check under the candidate's own name, switch, read back, commit, drain, unload.
Whoever calls holds the lock (`lock.py`); a change that was cut short is ended by :meth:`Promoter.recover` first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from enginehouse_builders.promotion.journal import Operation, Routing, Step
from enginehouse_builders.promotion.records import Canary, Change, StageEvent
from enginehouse_contract.errors import EnginehouseError, EngineUnavailableError, PromotionError
from enginehouse_contract.release import STAGES, release_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from enginehouse_builders.promotion.book import ReleaseBook
    from enginehouse_builders.promotion.live import LiveServer
    from enginehouse_contract.release import Release

_POLL_S: Final = 0.2
_SETTLE_S: Final = 1.2
"""The front door's gauges are up to half a second old: a release counts as drained when they stayed 0 for this long."""


@dataclass(slots=True)
class Outcome:
    """What a change came to; times in seconds, None for what did not happen."""

    operation: Operation
    ready_at_s: float | None = None  # when everything that is to answer was loaded, by the process's clock
    load_s: float | None = None
    switch_s: float | None = None  # from the first move of a stable name until new requests went to the new release
    ready_to_switched_s: float | None = None  # the same from the end of the load, or from the start without one
    gap_s: float | None = None  # with unload_first: how long nobody answered
    drain_s: float | None = None
    unloaded: list[int] = field(default_factory=list)
    still_open: dict[int, int] = field(default_factory=dict)  # releases that did not drain in time -> open requests


class Promoter:
    """Carries out operations on one server and its book. ``report`` hears of each step after it is on the disk."""

    def __init__(
        self,
        book: ReleaseBook,
        server: LiveServer,
        *,
        report: Callable[[str], None] = lambda _: None,
        drain_timeout_s: float = 300.0,
    ) -> None:
        self._book = book
        self._server = server
        self._report = report
        self._drain_timeout_s = drain_timeout_s

    def run(self, operation: Operation, baseline: Callable[[], Mapping[str, Any]] = dict) -> Outcome:
        """Carry out a new operation. *baseline* reads what a canary is later compared with, once it is loaded.

        Raises an error of our tree when it is refused or fails; then what served before still serves.
        """
        outcome = Outcome(self._book.begin(operation))
        try:
            self._prepare(outcome)
            self._switch(outcome)
        except EngineUnavailableError:
            raise  # nobody answers: what is served cannot be known now; the next command finds out
        except EnginehouseError as error:
            self._undo(outcome.operation, f"failed: {error}")
            raise
        self._commit(outcome, baseline)
        self._retire(outcome)
        return outcome

    def recover(self) -> str | None:
        """End an operation that was cut short and say what was done; None when there is none.

        Before the switch began it is undone; afterwards it is completed where its release still answers.
        """
        operation = self._book.unfinished()
        if operation is None:
            return None
        target, what = release_name(operation.target), operation.action.replace("_", " ")
        if operation.step < Step.SWITCHING:
            self._undo(operation, "cut short and undone")
            return f"the {what} of {target} was cut short ({operation.step.name.lower()}) and has been undone."
        outcome = Outcome(operation)
        if operation.step < Step.COMMITTED:
            if not all(self._server.is_ready(self._book.release(n)) for n in operation.after.releases):
                self._undo(operation, "cut short and undone: its release no longer answers")
                return f"the {what} of {target} was cut short; {target} no longer answers, so it has been undone."
            try:
                self._switch(outcome)
            except PromotionError as error:
                self._undo(operation, f"cut short and undone: {error}")
                return f"the {what} of {target} was cut short and could not be completed ({error}); it has been undone."
            self._commit(outcome, dict)
        self._retire(outcome)
        return f"the {what} of {target} was cut short ({operation.step.name.lower()}) and has been completed."

    # ---- the steps ----

    def _prepare(self, outcome: Outcome) -> None:
        """Publish, load and check every release that is to answer and does not yet."""
        operation = outcome.operation
        wanted = (*operation.after.releases, operation.target) if operation.action != "canary_end" else ()
        missing = [self._book.release(number) for number in dict.fromkeys(wanted)]
        for release in missing:
            self._server.publish(release)
        self._advance(outcome, Step.PUBLISHED, "published")
        missing = [release for release in missing if not self._server.is_ready(release)]
        gap_started_s = time.perf_counter()
        if missing and operation.swap == "unload_first":
            for number in operation.before.releases:
                self._unload(self._book.release(number))
        for release in missing:
            self._book.set_loaded(release)
            load_s = self._server.load(release)
            self._book.set_fact("last_load_s", load_s)
            outcome.load_s = (outcome.load_s or 0.0) + load_s
        outcome.ready_at_s = time.perf_counter()
        self._advance(outcome, Step.LOADED, "loaded" if missing else "already loaded")
        has_served = operation.action in {"rollback", "canary_end"}  # a loaded release of before is not asked again
        for release in missing or ([] if has_served else [self._book.release(operation.target)]):
            self._server.check(release)
        self._advance(outcome, Step.CHECKED, "checked under its own name")
        if missing and operation.swap == "unload_first":
            outcome.gap_s = time.perf_counter() - gap_started_s

    def _switch(self, outcome: Outcome) -> None:
        operation = outcome.operation
        if operation.action == "stage":
            return
        self._advance(outcome, Step.SWITCHING, "switching")
        started_s = time.perf_counter()
        switched_s = self._server.switch(operation.after, self._releases(operation.after))
        outcome.switch_s = switched_s - started_s
        outcome.ready_to_switched_s = switched_s - (outcome.ready_at_s or started_s)
        self._advance(outcome, Step.SWITCHED, "switched and read back")

    def _commit(self, outcome: Outcome, baseline: Callable[[], Mapping[str, Any]]) -> None:
        operation = outcome.operation
        pointed = self._book.stage(operation.stage)
        event = StageEvent(
            stage=operation.stage,
            action="promote" if operation.action == "stage" else operation.action,
            from_release=None if pointed is None else pointed.number,
            to_release=operation.target,
            who=operation.who,
            why=operation.why,
            override=operation.override,
            gates=operation.gates,
        )
        after = operation.after
        canary = None
        if after.canary is not None:
            canary = Canary(after.canary, after.share, after.by, after.min_requests, baseline=baseline())
        moves = operation.action in {"promote", "rollback", "stage"}
        operation = self._book.commit(operation, Change(event, moves_stage=moves, canary=canary))
        outcome.operation = operation
        self._report("committed")

    def _retire(self, outcome: Outcome) -> None:
        """Drain and unload every release that nothing points at any more."""
        operation = outcome.operation
        self._book.set_kept(operation.before.releases if operation.keep_loaded else ())
        drain_started_s = time.perf_counter()
        for release in self._unwanted():
            left = self._drain(release)
            if left:
                outcome.still_open[release.number] = left
                continue
            self._unload(release)
            outcome.unloaded.append(release.number)
            outcome.drain_s = time.perf_counter() - drain_started_s
        self._book.end(operation, "done" if not outcome.still_open else "done, not drained")
        self._report("done")

    def _unwanted(self) -> list[Release]:
        pointed = {release.number for stage in STAGES if (release := self._book.stage(stage)) is not None}
        canary = self._book.canary()
        pointed |= {canary.release} if canary else set()
        loaded = self._book.loaded()
        return [self._book.release(number) for number, kept in loaded.items() if not kept and number not in pointed]

    def _drain(self, release: Release) -> int:
        """Wait until a release answers nobody any more; return the requests still open when the time is up."""
        self._report(f"draining {release.name}")
        deadline_s = time.monotonic() + self._drain_timeout_s
        quiet_since_s: float | None = None
        while True:
            num_open, now_s = self._server.num_open(release), time.monotonic()
            if num_open > 0:
                quiet_since_s = None
                if now_s >= deadline_s:
                    return num_open
            else:
                quiet_since_s = now_s if quiet_since_s is None else quiet_since_s
                if now_s - quiet_since_s >= _SETTLE_S:
                    return 0
            time.sleep(_POLL_S)

    def _unload(self, release: Release) -> None:
        self._server.unload(release)
        self._server.retract(release)
        self._book.set_unloaded(release)
        self._report(f"unloaded {release.name}")

    def _undo(self, operation: Operation, outcome: str) -> None:
        """Make what served before serve again, and take away what was loaded for nothing."""
        before = self._releases(operation.before)
        for release in before.values():
            if not self._server.is_ready(release):
                self._server.publish(release)
                self._book.set_loaded(release)
                self._server.load(release)
        if not self._server.served().matches(operation.before):
            self._server.switch(operation.before, before)
        for release in self._unwanted():
            if release.number not in before and not self._drain(release):
                self._unload(release)
        self._book.end(operation, outcome)
        self._report("undone")

    def _releases(self, routing: Routing) -> dict[int, Release]:
        return {number: self._book.release(number) for number in routing.releases}

    def _advance(self, outcome: Outcome, step: Step, words: str) -> None:
        outcome.operation = self._book.advance(outcome.operation, step)
        self._report(words)


def end_operation_without_server(book: ReleaseBook) -> str | None:
    """End an operation that was cut short while no server runs: the stage says what the next server serves.

    Returns what was done, None when there was nothing to do.
    """
    operation = book.unfinished()
    if operation is None:
        return None
    is_done = operation.step >= Step.COMMITTED
    book.end(operation, "completed" if is_done else "cut short and undone")
    what = f"the {operation.action.replace('_', ' ')} of {release_name(operation.target)}"
    return f"{what} was cut short and has been {'completed' if is_done else 'undone'}."


def current_routing(book: ReleaseBook) -> Routing:
    """Return what should be answering by the book; raise :class:`PromotionError` when nothing is in production."""
    production = book.stage("production")
    if production is None:
        msg = "nothing is in production yet; start a server with `enginehouse serve BUILD` first."
        raise PromotionError(msg)
    canary = book.canary()
    if canary is None:
        return Routing(production.number)
    return Routing(production.number, canary.release, canary.share, canary.by, canary.min_requests)


def require_agreement(book: ReleaseBook, server: LiveServer) -> None:
    """Raise :class:`PromotionError` when a server answers from something else than the book says, or holds more.

    Someone loaded or switched by hand then; a change on top of that would hide it.
    """
    routing = current_routing(book)
    served = server.served()
    if not served.matches(routing):
        shown = served.problem or f"{release_name(served.stable) if served.stable else 'nothing'} answers"
        stable = release_name(routing.stable)
        msg = (
            f"production is {stable}, but {shown}: the server was changed by hand. "
            f"`enginehouse rollback --to {stable}` puts it back."
        )
        raise PromotionError(msg)
    known = {*book.loaded(), *routing.releases}
    if strangers := sorted(server.loaded() - known):
        names = ", ".join(f"`{model}`" for number in strangers for model in (f"tensorrt_llm-{release_name(number)}",))
        msg = f"{names} was loaded by hand; unload it first: it holds memory that the promotion counts on."
        raise PromotionError(msg)
