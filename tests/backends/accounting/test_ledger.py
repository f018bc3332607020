"""The ledger: exactly once, append-only, replays, refusals; the same on both databases."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, func, insert, select, text
from tests.backends.accounting.conftest import BOOK

from enginehouse_backends.accounting import schema
from enginehouse_backends.accounting.budgets import Budget, Limit
from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.records import ComputeShare, RequestKey, RequestTimes, Reservation, Settlement
from enginehouse_backends.accounting.windows import NS_PER_S
from enginehouse_contract.errors import ConfigurationError, InvalidRequestError, LedgerConflictError
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from pathlib import Path

KEY = RequestKey("acme", "r1", 1)
RESERVATION = Reservation("acme", "r1", "small", "sha256:b1", TokenUsage(100, 0, 50), attempt=1, key_id="web")
SETTLEMENT = Settlement(
    KEY,
    TokenUsage(60, 40, 20, 3, 2),
    "stop",
    RequestTimes(time_to_first_token_ns=5_000_000, duration_ns=90_000_000),
    ComputeShare(1234, 5678, is_estimated=True),
)


def num_rows(ledger: Ledger, kind: str) -> int:
    """Count the entries of a kind."""
    with ledger.database.connect() as connection:
        query = select(func.count()).where(schema.entries.c.kind == kind)
        return int(connection.execute(query).scalar_one())


def num_open_holds(ledger: Ledger) -> int:
    """Count the reservations that are not ended."""
    with ledger.database.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(schema.holds)).scalar_one())


def test_a_request_is_reserved_and_settled_once_with_everything_it_used(ledger: Ledger) -> None:
    """The record carries usage, price, times and energy as given, and reads back as it was answered."""
    admission = ledger.reserve(RESERVATION)
    record = ledger.settle(SETTLEMENT)

    assert admission.amount == 100 * 10**6 + 50 * 4 * 10**6
    assert record.amount == 60 * 10**6 + 40 * 250_000 + 20 * 4 * 10**6
    assert (record.currency, record.unit_prices) == ("USD", ("1", "0.25", "4"))
    assert record.book_id == parse_price_book(BOOK).book_id
    assert (record.usage, record.times, record.share) == (SETTLEMENT.usage, SETTLEMENT.times, SETTLEMENT.share)
    assert (record.key_id, record.model, record.build_id) == ("web", "small", "sha256:b1")
    assert record.settled_at_ns >= record.reserved_at_ns > 0
    assert ledger.find(KEY) == record
    assert num_open_holds(ledger) == 0


def test_replays_change_nothing(ledger: Ledger) -> None:
    """The same reservation, settlement, release or reversal again is answered as before."""
    first = ledger.reserve(RESERVATION)
    again = ledger.reserve(RESERVATION)
    record = ledger.settle(SETTLEMENT)

    assert again == dataclasses.replace(first, is_replay=True)
    assert ledger.settle(SETTLEMENT) == record
    assert ledger.reserve(RESERVATION).is_replay
    ledger.reverse(KEY, "a mistake")
    ledger.reverse(KEY, "a mistake")
    other = ledger.reserve(dataclasses.replace(RESERVATION, request_id="r2")).key
    ledger.release(other, "overloaded")
    ledger.release(other, "overloaded")
    assert [num_rows(ledger, kind) for kind in ("reservation", "settlement", "reversal", "release")] == [2, 1, 1, 1]


def test_the_same_key_with_other_content_is_refused(ledger: Ledger) -> None:
    """Nothing is overwritten; the refusal names the key."""
    ledger.reserve(RESERVATION)
    with pytest.raises(LedgerConflictError, match="reserved before with other content"):
        ledger.reserve(dataclasses.replace(RESERVATION, model="large"))
    record = ledger.settle(SETTLEMENT)
    with pytest.raises(LedgerConflictError, match=r"`request_id` was settled before with other content.*r1"):
        ledger.settle(dataclasses.replace(SETTLEMENT, usage=TokenUsage(1, 0, 1)))
    ledger.reverse(KEY, "a mistake")
    with pytest.raises(LedgerConflictError, match="for another reason"):
        ledger.reverse(KEY, "another mistake")

    assert ledger.find(KEY) == record


def test_what_was_not_reserved_cannot_be_settled(ledger: Ledger) -> None:
    """Nor can what was released; nor can what was not settled be reversed."""
    with pytest.raises(LedgerConflictError, match="has no open reservation"):
        ledger.settle(SETTLEMENT)
    ledger.reserve(RESERVATION)
    with pytest.raises(LedgerConflictError, match="has no settlement to reverse"):
        ledger.reverse(KEY, "none")
    ledger.release(KEY, "overloaded")
    with pytest.raises(LedgerConflictError, match="has no open reservation"):
        ledger.settle(SETTLEMENT)
    with pytest.raises(LedgerConflictError, match="has no open reservation"):
        ledger.release(RequestKey("acme", "never", 1), "overloaded")


def test_a_repeated_request_id_becomes_the_next_attempt(ledger: Ledger) -> None:
    """Clients that send the same id for ever are billed for each request."""
    requests = [dataclasses.replace(RESERVATION, attempt=None, claim=f"call {number}") for number in range(40)]
    with ThreadPoolExecutor(16) as pool:
        admissions = list(pool.map(ledger.reserve, requests))

    assert sorted(admission.key.attempt for admission in admissions) == list(range(1, 41))
    assert not any(admission.is_replay for admission in admissions)
    assert ledger.reserve(requests[7]) == dataclasses.replace(admissions[7], is_replay=True)


def test_one_refused_operation_harms_no_other_of_its_batch(ledger: Ledger) -> None:
    """Conflicts and good settlements that are committed together are told apart."""
    keys = [ledger.reserve(dataclasses.replace(RESERVATION, request_id=f"r{index}")).key for index in range(30)]
    futures = [ledger.settle_soon(dataclasses.replace(SETTLEMENT, key=key)) for key in keys]
    futures.append(ledger.settle_soon(dataclasses.replace(SETTLEMENT, key=RequestKey("acme", "never", 1))))
    futures += [ledger.settle_soon(dataclasses.replace(SETTLEMENT, key=key)) for key in keys]

    assert [future.result().key for future in futures[:30]] == keys
    assert isinstance(futures[30].exception(), LedgerConflictError)
    assert [future.result() for future in futures[31:]] == [future.result() for future in futures[:30]]
    assert num_rows(ledger, "settlement") == 30


def test_an_unknown_model_is_refused_or_null_and_never_free(ledger: Ledger) -> None:
    """The book in force says which; without any book amounts are null too."""
    unknown = dataclasses.replace(RESERVATION, model="mystery")
    with pytest.raises(ConfigurationError, match="`model` has no price in the price book sha256:"):
        ledger.reserve(unknown)
    later = BOOK.replace("2020-01-01", "2021-01-01") + "unknown_model: 'null'\n"
    ledger.add_price_book(parse_price_book(later))
    admission = ledger.reserve(unknown)
    record = ledger.settle(SETTLEMENT)

    assert admission.amount is None
    assert (record.amount, record.currency, record.book_id, record.unit_prices) == (None, None, None, None)


def test_prices_are_those_of_the_admission(ledger_url: str) -> None:
    """A book that comes into force while a request runs does not change its price; the next request has it."""
    now_ns = [parse_moment("2025-06-01T00:00:00+00:00")]
    with Ledger(ledger_url, clock=lambda: now_ns[0]) as ledger:
        ledger.add_price_book(parse_price_book(BOOK))
        ledger.add_price_book(parse_price_book(BOOK.replace("2020-01-01", "2025-06-02").replace('"4"', '"8"')))
        ledger.reserve(RESERVATION)
        now_ns[0] += 2 * 24 * 3600 * NS_PER_S
        first = ledger.settle(SETTLEMENT)
        key = ledger.reserve(dataclasses.replace(RESERVATION, request_id="r2")).key
        second = ledger.settle(dataclasses.replace(SETTLEMENT, key=key))

    assert first.unit_prices == ("1", "0.25", "4")
    assert second.unit_prices == ("1", "0.25", "8")


def test_two_price_books_for_one_date_are_refused(ledger: Ledger) -> None:
    """The same book again is fine; so is one of another date; another currency is not."""
    ledger.add_price_book(parse_price_book(BOOK))
    with pytest.raises(ConfigurationError, match="`effective_from` is the date of another price book already"):
        ledger.add_price_book(parse_price_book(BOOK.replace('"4"', '"5"')))
    with pytest.raises(ConfigurationError, match="`currency` differs from the ledger's; limit USD, given EUR"):
        ledger.add_price_book(parse_price_book(BOOK.replace("USD", "EUR").replace("2020", "2021")))

    assert len(ledger.price_list().books) == 1


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("tenant", "ac\nme", "holds control characters"),
        ("tenant", "x" * 10_000, "has a bad length"),
        ("tenant", "", "has a bad length"),
        ("request_id", "r\x00", "holds control characters"),
        ("key_id", "\ud800", "holds control characters"),
        ("model", "m" * 257, "has a bad length"),
        ("attempt", 0, "is out of range"),
        ("attempt", 2**63, "is out of range"),
    ],
)
def test_bad_names_are_refused_before_anything_is_written(field: str, value: object, problem: str) -> None:
    """The refusal names the field, and shows long values shortened."""
    with pytest.raises(InvalidRequestError) as caught:
        dataclasses.replace(RESERVATION, **{field: value})

    assert str(caught.value).startswith(f"`{field}` {problem}")
    assert len(str(caught.value)) < 300


def test_a_clock_that_is_set_back_harms_nothing(ledger_url: str) -> None:
    """A record never ends before it began."""
    now_ns = [parse_moment("2025-06-01T12:00:00+00:00")]
    with Ledger(ledger_url, clock=lambda: now_ns[0]) as ledger:
        ledger.reserve(RESERVATION)
        now_ns[0] -= 3600 * NS_PER_S
        record = ledger.settle(SETTLEMENT)

    assert record.settled_at_ns == record.reserved_at_ns


def test_a_ledger_of_a_newer_program_is_refused(ledger_url: str) -> None:
    """It says both versions and what to do."""
    with Ledger(ledger_url) as ledger, ledger.database.begin() as connection:
        connection.execute(insert(schema.ledger_schema), {"version": 99, "applied_at_ns": 0})
    with pytest.raises(ConfigurationError, match=r"has schema version 99, this program knows 2.*Upgrade"):
        Ledger(ledger_url)


def test_a_ledger_of_version_1_gets_the_class_it_lacks(ledger_url: str) -> None:
    """Its entries discarded nothing, and what is written afterwards is counted."""
    with Ledger(ledger_url) as ledger:
        ledger.reserve(RESERVATION)
        record = ledger.settle(SETTLEMENT)
        with ledger.database.begin() as connection:
            for table in ("entries", "holds", "daily_usage"):
                connection.execute(text(f"ALTER TABLE {table} DROP COLUMN num_discarded_tokens"))
            connection.execute(text("DELETE FROM ledger_schema WHERE version = 2"))
    usage = dataclasses.replace(SETTLEMENT.usage, num_discarded_tokens=3)
    with Ledger(ledger_url) as ledger:
        assert ledger.find(KEY) == record
        key = ledger.reserve(dataclasses.replace(RESERVATION, request_id="later")).key
        assert ledger.settle(dataclasses.replace(SETTLEMENT, key=key, usage=usage)).usage == usage


def test_an_older_ledger_is_migrated_once_and_keeps_its_entries(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the steps that are missing run, in order."""
    with Ledger(ledger_url) as ledger:
        ledger.reserve(RESERVATION)
        record = ledger.settle(SETTLEMENT)
    ran: list[int] = []
    steps = (*schema.MIGRATIONS, lambda _: ran.append(2), lambda _: ran.append(3))
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    for _ in range(2):
        with Ledger(ledger_url) as ledger:
            assert ledger.find(KEY) == record

    assert ran == [2, 3]


def test_the_holds_of_dead_processes_are_settled_from_their_last_durable_counts(ledger_url: str) -> None:
    """Exactly once, marked; those of living processes are left alone; a late settlement is refused."""
    with Ledger(ledger_url, owner="dead") as dead, Ledger(ledger_url, owner="alive") as alive:
        dead.add_price_book(parse_price_book(BOOK))
        for index in range(5):
            key = dead.reserve(dataclasses.replace(RESERVATION, request_id=f"d{index}")).key
            if index:
                dead.progress(key, TokenUsage(10, 0, index)).result()
        alive.reserve(RESERVATION)
        with Ledger(ledger_url, owner="next") as ledger:
            records = ledger.recover(lambda owner: owner != "dead")
            assert ledger.recover(lambda owner: owner != "dead") == []
            assert num_open_holds(ledger) == 1
        with pytest.raises(LedgerConflictError):
            dead.settle(dataclasses.replace(SETTLEMENT, key=RequestKey("acme", "d3", 1)))

    by_id = {record.key.request_id: record for record in records}
    assert sorted(by_id) == [f"d{index}" for index in range(5)]
    assert by_id["d0"].usage == TokenUsage()
    assert by_id["d3"].usage == TokenUsage(10, 0, 3)
    assert by_id["d3"].amount == 10 * 10**6 + 3 * 4 * 10**6
    assert all(record.is_recovered and record.finish_reason == "error" for record in records)


def test_progress_of_an_ended_request_changes_nothing(ledger: Ledger) -> None:
    """A count that arrives late is dropped."""
    ledger.reserve(RESERVATION)
    record = ledger.settle(SETTLEMENT)
    ledger.progress(KEY, TokenUsage(1, 0, 1)).result()

    assert ledger.find(KEY) == record


def parse_moment(text: str) -> int:
    """Return an ISO 8601 moment as Unix time in ns."""
    from datetime import datetime  # noqa: PLC0415 - used here only

    return int(datetime.fromisoformat(text).timestamp()) * NS_PER_S


def test_looking_up_keys_never_scans_a_table(tmp_path: Path) -> None:
    """SQLite's plan for what every batch asks: searches by index only."""
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        plans: list[str] = []

        def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            if statement.startswith(("SELECT", "UPDATE", "DELETE")):
                raw = connection.connection.driver_connection
                one = parameters[0] if isinstance(parameters, list) else parameters
                plans.extend(row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {statement}", one))

        event.listen(ledger.database, "before_cursor_execute", explain)
        ledger.set_budget(Budget("acme", "day", tokens=Limit(hard=10**12)))
        ledger.reserve(RESERVATION)
        ledger.reserve(RESERVATION)
        ledger.reserve(dataclasses.replace(RESERVATION, attempt=None, claim="another call"))
        ledger.progress(KEY, TokenUsage()).result()
        ledger.settle(SETTLEMENT)
        ledger.settle(SETTLEMENT)
        ledger.reverse(KEY, "a mistake")

    scans = {plan for plan in plans if plan.startswith("SCAN")}
    assert any(plan.startswith("SEARCH entries") for plan in plans)
    assert {plan.split()[1] for plan in scans} <= {"anon_1", "price_books"}  # the keys asked for, and a few books
