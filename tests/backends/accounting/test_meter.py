"""The meter: one record for one request, however it ends and whatever the ledger does meanwhile."""

from __future__ import annotations

import gc
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, select
from tests.backends.accounting.conftest import BOOK

from enginehouse_backends.accounting import database
from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.ledger_meter import LedgerMeter
from enginehouse_backends.accounting.meter import NoMeter
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.records import ComputeShare, RequestTimes
from enginehouse_backends.accounting.schema import entries, holds
from enginehouse_backends.accounting.views import records
from enginehouse_contract.errors import (
    DeadlineExceededError,
    EngineFailureError,
    InvalidRequestError,
    LedgerUnavailableError,
    RequestCancelledError,
)
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

    from enginehouse_backends.accounting.ledger_meter import LedgerRequest

USED = TokenUsage(90, 10, 20)


def open_one(meter: LedgerMeter, request_id: str = "r1") -> LedgerRequest:
    """Open one request's accounting."""
    return meter.open(
        tenant="acme", request_id=request_id, model="small", build_id="b", upper_bound=TokenUsage(100, 0, 50)
    )


@pytest.fixture
def meter(ledger: Ledger) -> LedgerMeter:
    """Meter into a ledger, with every count made durable."""
    return LedgerMeter(ledger, progress_period_s=0.0)


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "timeout", "error"])
def test_every_exit_settles_once_with_what_was_used(meter: LedgerMeter, reason: Any) -> None:
    """Streams, disconnects and errors alike: the first settlement counts, later ones repeat its answer."""
    with open_one(meter) as request:
        request.progress(TokenUsage(90, 10, 5))
        record = request.settle(USED, reason, RequestTimes(1, 2), ComputeShare(3, 4))
        again = request.settle(TokenUsage(), "error")
    assert record is not None

    assert again is record
    assert (record.usage, record.finish_reason, record.times, record.share) == (
        USED,
        reason,
        RequestTimes(1, 2),
        ComputeShare(3, 4),
    )
    assert records(meter.ledger.database) == [record]
    assert meter.counts()["settled"] == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestCancelledError("gone"), "cancelled"),
        (DeadlineExceededError("late"), "timeout"),
        (EngineFailureError("broken"), "error"),
        (ZeroDivisionError(), "error"),
    ],
)
def test_leaving_the_block_settles_what_was_counted_last(meter: LedgerMeter, error: Exception, reason: str) -> None:
    """The error says how it finished, and goes on."""
    request = open_one(meter)
    request.progress(USED)
    with pytest.raises(type(error)), request:
        raise error
    (record,) = records(meter.ledger.database)

    assert (record.usage, record.finish_reason) == (USED, reason)


def test_a_dropped_handle_is_settled_as_an_error(meter: LedgerMeter) -> None:
    """The finalizer of last resort; it does not wait."""
    request = open_one(meter)
    request.progress(USED)
    del request
    gc.collect()
    meter.close()
    with meter.ledger:
        (record,) = records(meter.ledger.database)

    assert (record.usage, record.finish_reason) == (USED, "error")
    assert meter.counts()["abandoned"] == 1


def test_a_request_that_never_started_is_released(meter: LedgerMeter) -> None:
    """It leaves no record and no hold; settling it afterwards does nothing."""
    request = open_one(meter)
    request.release("overloaded")

    assert request.settle(USED, "stop") is None
    assert records(meter.ledger.database) == []
    assert num_open(meter.ledger) == 0


def test_times_are_measured_unless_given(meter: LedgerMeter) -> None:
    """The first token is the first count with an output; a request without output never had one."""
    request = open_one(meter)
    request.progress(TokenUsage(100, 0, 0))
    request.progress(TokenUsage(100, 0, 1))
    record = request.settle(USED, "stop")
    silent = open_one(meter, "r2").settle(TokenUsage(100, 0, 0), "error")
    assert record is not None
    assert silent is not None

    assert record.times.time_to_first_token_ns is not None
    assert record.times.duration_ns is not None
    assert 0 < record.times.time_to_first_token_ns <= record.times.duration_ns
    assert silent.times.time_to_first_token_ns is None


def test_counts_are_durable_before_the_end(meter: LedgerMeter, ledger_url: str) -> None:
    """A process that dies is settled from its last counts by the next one."""
    request = open_one(meter)
    request.progress(USED)
    pending = request._state.pending
    assert pending is not None
    pending.result()
    with Ledger(ledger_url, owner="next") as ledger:
        (record,) = ledger.recover(lambda _: False)

    assert (record.usage, record.is_recovered) == (USED, True)
    request._finalizer.detach()


def test_counts_are_made_durable_at_most_once_a_period(ledger: Ledger) -> None:
    """A fast stream does not flood the ledger."""
    meter = LedgerMeter(ledger, progress_period_s=3600.0)
    request = open_one(meter)
    request.progress(TokenUsage(100, 0, 1))
    first = request._state.pending
    for count in range(2, 50):
        request.progress(TokenUsage(100, 0, count))

    assert request._state.pending is first
    request.settle(USED, "stop")


def test_without_accounting_nothing_is_written_or_refused() -> None:
    """The same calls do nothing."""
    meter = NoMeter()
    with meter.open(tenant="a\nb", request_id="", model="", build_id="", upper_bound=USED) as request:
        request.progress(USED)
        request.release("never")
        assert request.settle(USED, "stop", times=RequestTimes(), share=None) is None
        assert request.soft_limits == ()
    meter.close()
    assert meter.counts() == {}


def test_bad_names_are_refused_at_the_door(meter: LedgerMeter) -> None:
    """Nothing is written."""
    with pytest.raises(InvalidRequestError, match="`tenant` holds control characters"):
        meter.open(tenant="a\tb", request_id="r", model="small", build_id="b", upper_bound=USED)
    assert num_open(meter.ledger) == 0


class Outage:
    """Keeps a ledger's database away: SQLite locked by another program, PostgreSQL killed."""

    def __init__(self, url: str, server: PostgresServer | None) -> None:
        self._server = server
        self._path = url.removeprefix("sqlite:///")
        self._lock: sqlite3.Connection | None = None

    def begin(self) -> None:
        if self._server is not None:
            self._server.kill()
        else:
            self._lock = sqlite3.connect(self._path, isolation_level=None)
            self._lock.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        if self._server is not None:
            self._server.start()
        elif self._lock is not None:
            self._lock.close()


@pytest.fixture
def outage(ledger_url: str, request: pytest.FixtureRequest) -> Outage:
    """Return an outage of the ledger's database that has not begun."""
    is_postgres = ledger_url.startswith("postgresql")
    return Outage(ledger_url, request.getfixturevalue("postgres") if is_postgres else None)


@pytest.fixture
def impatient_url(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a ledger that gives up on locks at once."""
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.01)
    with Ledger(ledger_url) as ledger:
        ledger.add_price_book(parse_price_book(BOOK))
    return ledger_url


def num_open(ledger: Ledger) -> int:
    """Count open holds."""
    with ledger.database.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(holds)).scalar_one())


def wait_until_paid(meter: LedgerMeter) -> None:
    """Wait for what is owed to be written."""
    deadline_s = time.monotonic() + 60
    while meter.counts()["owed"]:
        assert time.monotonic() < deadline_s, "debts were not paid"
        time.sleep(0.02)


def test_refusing_policy_turns_requests_away_and_keeps_settlements(impatient_url: str, outage: Outage) -> None:
    """What runs when the ledger goes away is settled when it is back, with the counts of then."""
    meter = LedgerMeter(Ledger(impatient_url), "refuse")
    running = open_one(meter)
    outage.begin()
    with pytest.raises(LedgerUnavailableError, match=r"the ledger (sqlite|postgresql).* failed: .*"):
        open_one(meter, "r2")
    with pytest.raises(LedgerUnavailableError):
        running.settle(USED, "stop")
    assert running.settle(USED, "stop") is None
    outage.end()
    wait_until_paid(meter)
    (record,) = records(meter.ledger.database)

    assert (record.key, record.usage, record.finish_reason) == (running.key, USED, "stop")
    assert num_open(meter.ledger) == 0
    assert {name: count for name, count in meter.counts().items() if count} == {"opened": 1, "refused": 1, "failed": 1}
    meter.close()


def test_serving_policy_answers_and_writes_everything_later(impatient_url: str, outage: Outage) -> None:
    """Requests that began before, during and after the outage all have one record."""
    meter = LedgerMeter(Ledger(impatient_url), "serve")
    before = open_one(meter, "before")
    outage.begin()
    assert before.settle(USED, "stop") is None
    during = open_one(meter, "during")
    during.progress(TokenUsage(90, 10, 1))
    assert during.settle(USED, "length") is None
    spanning = open_one(meter, "spanning")
    outage.end()
    wait_until_paid(meter)
    record = spanning.settle(USED, "stop")

    assert record is not None
    assert {it.key.request_id: it.finish_reason for it in records(meter.ledger.database)} == {
        "before": "stop",
        "during": "length",
        "spanning": "stop",
    }
    assert num_open(meter.ledger) == 0
    counts = meter.counts()
    assert (counts["opened"], counts["unreserved"], counts["failed"], counts["settled"]) == (1, 2, 2, 1)
    meter.close()


def test_a_ledger_that_is_away_at_the_start_is_opened_when_it_is_back(impatient_url: str, outage: Outage) -> None:
    """Under the serving policy a server starts without it."""
    outage.begin()
    with pytest.raises(LedgerUnavailableError):
        Ledger(impatient_url)
    meter = LedgerMeter(Ledger(impatient_url, may_be_away=True), "serve")
    assert open_one(meter).settle(USED, "stop") is None
    outage.end()
    wait_until_paid(meter)

    assert [record.usage for record in records(meter.ledger.database)] == [USED]
    meter.close()


def test_a_reservation_that_failed_after_it_was_durable_is_released(meter: LedgerMeter) -> None:
    """As when the connection breaks while COMMIT is answered: the refused request leaves no hold behind."""
    apply = meter.ledger._commits._apply

    def break_afterwards(batch: Any) -> Any:
        apply(batch)
        raise LedgerUnavailableError("the connection broke")

    meter.ledger._commits._apply = break_afterwards
    with pytest.raises(LedgerUnavailableError):
        open_one(meter)
    assert num_open(meter.ledger) == 1
    meter.ledger._commits._apply = apply
    meter.close()
    with meter.ledger:
        assert num_open(meter.ledger) == 0
        with meter.ledger.database.connect() as connection:
            kinds = connection.execute(select(entries.c.kind).order_by(entries.c.entry_id)).scalars().all()
    assert kinds == ["reservation", "release"]


def test_threads_may_open_and_settle_at_once(meter: LedgerMeter) -> None:
    """Two hundred requests from twenty threads, two hundred records."""

    def run(number: int) -> None:
        for index in range(10):
            with open_one(meter, f"{number}-{index}") as request:
                request.progress(TokenUsage(100, 0, index))
                request.settle(TokenUsage(100, 0, index), "stop")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = records(meter.ledger.database, limit=1000)

    assert len({record.key for record in found}) == len(found) == 200
    assert all(record.usage.num_output_tokens == int(record.key.request_id.split("-")[1]) for record in found)
    assert num_open(meter.ledger) == 0
