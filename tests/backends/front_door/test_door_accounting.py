"""The front door's books: whatever becomes of a request, its reservation becomes one record or none is owed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.front_door import END_ID, FakeEngine, ask, tokens_of, wait_until

from enginehouse_backends.accounting import views
from enginehouse_backends.accounting.budgets import Budget, Limit
from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.ledger_meter import LedgerMeter
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.front_door.row_usage import RowUsage
from enginehouse_contract.errors import BudgetExceededError, InvalidRequestError, OverloadedError
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from enginehouse_backends.accounting.records import UsageRecord
    from enginehouse_backends.front_door.door import FrontDoor

    OpenDoor = Callable[..., FrontDoor]

BOOK = """\
currency: USD
effective_from: 2020-01-01T00:00:00Z
prices:
  - model: small
    input: "1"
    cached_input: "0.25"
    output: "4"
"""


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[LedgerMeter]:
    """Account in a new ledger."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.add_price_book(parse_price_book(BOOK))
    opened = LedgerMeter(ledger)
    yield opened
    opened.close()


def records(meter: LedgerMeter, count: int) -> list[UsageRecord]:
    """Wait for so many records, and return all."""
    wait_until(lambda: len(views.records(meter.ledger.database)) == count)
    return views.records(meter.ledger.database)


def test_the_last_response_tells_what_the_record_says(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """Cached prompt tokens at their price, output at its own; the record is durable before the answer."""
    sink = ask(open_door(FakeEngine([[*tokens_of("ab"), END_ID]])), meter=meter, text_input="a prompt" * 8)

    assert sink.ended.wait(5)
    (record,) = views.records(meter.ledger.database)
    assert record.usage == TokenUsage(64 - 32, 32, 3)
    assert record.finish_reason == "stop"
    assert sink.responses[-1]["cost"][0, 0] == b"0.000052"
    assert sink.responses[-1]["currency"][0, 0] == b"USD"
    assert sink.responses[-1]["price_book_id"][0, 0].decode() == record.book_id
    assert record.amount == 52_000_000
    assert all("cost" not in response for response in sink.responses[:-1])


def test_without_a_price_there_is_no_cost_on_the_wire(open_door: OpenDoor, tmp_path: Path) -> None:
    """Unknown is not 0: the tensor is left out."""
    meter = LedgerMeter(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
    sink = ask(open_door(FakeEngine([[*tokens_of("ab"), END_ID]])), meter=meter)

    assert sink.ended.wait(5)
    assert not {"cost", "currency", "price_book_id", "energy_joules"} & set(sink.responses[-1])
    assert records(meter, 1)[0].amount is None
    meter.close()


def test_what_was_generated_behind_a_stop_string_is_not_billed(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """It is counted as discarded, so that the classes still add up to what the engine did."""
    engine = FakeEngine([tokens_of("one STOP and on")])
    sink = ask(open_door(engine), meter=meter, stop_words=["STOP"])

    assert sink.ended.wait(5)
    (record,) = records(meter, 1)
    assert (record.usage.num_output_tokens, record.usage.num_discarded_tokens) == (8, 7)
    assert record.finish_reason == "stop"


def test_sequences_of_a_row_are_one_record_and_pay_the_prompt_once(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """What the second sequence computed of the prompt again is cost, not bill; the last end carries the money."""
    engine = FakeEngine([[*tokens_of("first"), END_ID], [*tokens_of("second"), END_ID]])
    sink = ask(open_door(engine), meter=meter, num_return_sequences=2, text_input="x" * 40)

    assert sink.ended.wait(5)
    (record,) = records(meter, 1)
    assert record.usage == TokenUsage(8, 32, 13, num_recomputed_tokens=8)
    assert ["cost" in response for response in sink.responses if "finish_reason" in response] == [False, True]


def test_rows_of_a_batch_have_a_record_each(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """They are told apart by their number behind the request's id."""
    sink = ask(open_door(FakeEngine([[*tokens_of("x"), END_ID]])), meter=meter, rows=3)

    assert sink.ended.wait(5)
    assert sorted(record.key.request_id for record in records(meter, 3)) == ["id-1#0", "id-1#1", "id-1#2"]


def test_a_client_that_leaves_pays_for_what_was_generated(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """The record says that it left."""
    engine = FakeEngine([tokens_of("never ending")], num_free=3)
    sink = ask(open_door(engine), meter=meter)
    wait_until(lambda: len(sink.responses) == 3)
    sink.has_left = True

    assert sink.ended.wait(5)
    (record,) = records(meter, 1)
    assert (record.finish_reason, record.usage.num_output_tokens) == ("cancelled", 3)


def test_a_dead_engines_requests_are_settled_as_errors(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """With what had come until then, though the row's own thread hangs."""
    engine = FakeEngine([tokens_of("hang")], num_free=2)
    sink = ask(open_door(engine), meter=meter)
    wait_until(lambda: len(sink.responses) == 2)
    engine.is_dead = True

    assert sink.ended.wait(5)
    (record,) = records(meter, 1)
    assert (record.finish_reason, record.usage.num_output_tokens) == ("error", 2)
    engine.gate.set()  # the thread comes back from the dead: it must not settle again
    wait_until(lambda: meter.counts()["settled"] == 1)


def test_an_engines_refusal_is_a_record_of_nothing(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """A request that ran and used nothing is one record with no tokens and no money."""
    sink = ask(open_door(FakeEngine([[]], error=InvalidRequestError("`top_p` must lie in (0, 1]"))), meter=meter)

    assert sink.ended.wait(5)
    (record,) = records(meter, 1)
    assert (record.finish_reason, record.usage, record.amount) == ("error", TokenUsage(), 0)


def test_a_request_that_never_started_leaves_no_record(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """Its deadline passed in the queue: what it had reserved is free again."""
    engine = FakeEngine([[*tokens_of("busy"), END_ID]], num_free=1)
    door = open_door(engine, max_active=1)
    busy = ask(door, meter=meter)
    wait_until(lambda: busy.responses)
    waiting = ask(door, meter=meter, deadline_s=0.0)

    assert waiting.ended.wait(5)
    wait_until(lambda: meter.counts()["released"] == 1)
    engine.gate.set()
    assert busy.ended.wait(5)
    assert len(records(meter, 1)) == 1


def test_closing_the_door_leaves_nothing_open(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """What ran is settled, what waited is released, before the door is closed."""
    engine = FakeEngine([tokens_of("endless")], num_free=2)
    door = open_door(engine, max_active=1)
    running = ask(door, meter=meter)
    wait_until(lambda: len(running.responses) == 2)
    ask(door, meter=meter)
    door.close()

    counts = meter.counts()
    assert (counts["opened"], counts["settled"], counts["released"]) == (2, 1, 1)
    (record,) = views.records(meter.ledger.database)
    assert (record.finish_reason, record.usage.num_output_tokens) == ("error", 2)
    assert meter.ledger.recover(lambda _: False) == []


def test_a_budget_without_room_refuses(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """The request's upper bound counts: what it may use, not what it will."""
    meter.ledger.set_budget(Budget("default", "day", tokens=Limit(hard=150)))
    engine = FakeEngine([[*tokens_of("ok"), END_ID]], num_free=0)
    door = open_door(engine)
    first = ask(door, meter=meter, max_tokens=100)
    with pytest.raises(BudgetExceededError, match="150"):
        ask(door, meter=meter, max_tokens=100)

    engine.gate.set()
    assert first.ended.wait(5)
    again = ask(door, meter=meter, max_tokens=100)
    assert again.ended.wait(5)
    assert len(records(meter, 2)) == 2


def test_an_overloaded_door_gives_the_reservation_back(open_door: OpenDoor, meter: LedgerMeter) -> None:
    """The caller releases what the door refused."""
    door = open_door(FakeEngine([tokens_of("x")], num_free=0), max_active=1, max_waiting=0)
    ask(door, meter=meter)
    with pytest.raises(OverloadedError):
        ask(door, meter=meter)


def test_tokens_add_up_to_what_the_engine_computed() -> None:
    """Uncached input, output and discarded but for the last token, rejected drafts, and what was computed again."""
    usage = RowUsage(num_input_tokens=50, num_sequences=1)
    sequence = usage.sequences[0]
    assert usage.tokens() == TokenUsage()
    sequence.num_generated_tokens, sequence.num_output_tokens = 12, 10
    assert usage.tokens() == TokenUsage(50, 0, 10, num_discarded_tokens=2)
    counts = {"num_cached_input_tokens": 32, "num_recomputed_tokens": 5, "total_draft_tokens": 9}
    counts |= {"total_accepted_draft_tokens": 4, "machine_time_ns": 77}
    sequence.metrics = {name: np.array([[value]]) for name, value in counts.items()}

    assert usage.tokens() == TokenUsage(18, 32, 10, 5, 5, 2)
    share = usage.share()
    assert share is not None
    assert share.machine_ns == 77
    assert not usage.tells_energy
