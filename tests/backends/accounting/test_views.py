"""Views: sums that agree with the entries, two bases that add up, an export that others can read."""

from __future__ import annotations

import random
from datetime import datetime, timezone
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from tests.backends.accounting.conftest import BOOK

from enginehouse_backends.accounting.allocation import allocate
from enginehouse_backends.accounting.focus import focus_rows
from enginehouse_backends.accounting.ledger import Ledger, MachineTime
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.records import ComputeShare, Reservation, Settlement
from enginehouse_backends.accounting.views import DIMENSIONS, Period, build_cost, cost, records, usage
from enginehouse_backends.accounting.windows import NS_PER_S
from enginehouse_contract.money import Pico
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from enginehouse_backends.accounting.records import UsageRecord

DAY_NS = 24 * 3600 * NS_PER_S
START_NS = int(datetime(2025, 6, 1, 12, tzinfo=timezone.utc).timestamp()) * NS_PER_S


class History:
    """A ledger with 120 requests over four days, and what they came to."""

    def __init__(self, url: str) -> None:
        rng = random.Random(3)
        self.now_ns = START_NS
        self.ledger = Ledger(url, clock=lambda: self.now_ns)
        self.ledger.add_price_book(parse_price_book(BOOK + "unknown_model: 'null'\n"))
        later = BOOK.replace("2020-01-01", "2025-06-03").replace('"0.36"', '"0.72"').replace('"4"', '"5"')
        self.ledger.add_price_book(parse_price_book(later + "unknown_model: 'null'\n"))
        self.records: list[UsageRecord] = []
        for number in range(120):
            self.now_ns = START_NS + number // 30 * DAY_NS + number * NS_PER_S
            tenant, model = rng.choice(("acme", "beta")), rng.choice(("small", "small", "mystery"))
            bound = TokenUsage(1000, 0, 1000)
            key = self.ledger.reserve(Reservation(tenant, f"r{number}", model, f"{model}-build", bound)).key
            used = TokenUsage(rng.randrange(1000), rng.randrange(100), rng.randrange(1000), 5, 7)
            share = ComputeShare(rng.randrange(10**6), rng.randrange(10**9), is_estimated=True)
            self.records.append(self.ledger.settle(Settlement(key, used, "stop", share=share)))
        for day in range(4):
            self.now_ns = START_NS + day * DAY_NS
            for machine in ("m1", "m2"):
                for _ in range(2):
                    self.ledger.record_machine_time(MachineTime(machine, 300 * NS_PER_S, idle_energy_uj=5))


@pytest.fixture
def history(ledger_url: str) -> Iterator[History]:
    """Run the history."""
    made = History(ledger_url)
    with made.ledger:
        yield made


@pytest.mark.parametrize("dimensions", [(), ("tenant",), ("model", "day"), DIMENSIONS])
def test_usage_is_the_sum_of_the_records(history: History, dimensions: tuple[str, ...]) -> None:
    """By any dimensions, to the token and the pico-unit; null amounts are counted apart."""

    def value(record: UsageRecord, name: str) -> str:
        day = datetime.fromtimestamp(record.settled_at_ns // NS_PER_S, timezone.utc).date().isoformat()
        return {"tenant": record.key.tenant, "model": record.model, "build_id": record.build_id, "day": day}[name]

    lines = usage(history.ledger.database, dimensions)  # type: ignore[arg-type] # names from the parametrization
    expected: dict[tuple[str, ...], list[UsageRecord]] = {}
    for record in history.records:
        expected.setdefault(tuple(value(record, name) for name in dimensions), []).append(record)

    assert [line.group for line in lines] == sorted(expected)
    for line in lines:
        members = expected[line.group]
        assert line.num_requests == line.num_estimated == len(members)
        assert line.usage == sum((record.usage for record in members), start=TokenUsage())
        assert line.amount == sum(record.amount for record in members if record.amount is not None)
        assert line.num_unpriced == sum(record.amount is None for record in members)
        assert line.machine_ns == sum(record.share.machine_ns for record in members if record.share)


def test_a_period_holds_both_its_days(history: History) -> None:
    """Open where it is not stated."""
    count = lambda period: sum(line.num_requests for line in usage(history.ledger.database, ("day",), period))  # noqa: E731

    assert count(Period("2025-06-02", "2025-06-03")) == 60
    assert count(Period(last_day="2025-06-01")) == 30
    assert count(Period(first_day="2025-06-09")) == 0
    assert usage(history.ledger.database, (), Period(first_day="2025-06-09")) == []


def test_a_reversal_takes_a_record_out_of_every_sum(history: History) -> None:
    """As if it had never been, on the day of the reversal."""
    for record in history.records:
        history.ledger.reverse(record.key, "all of it")
    (line,) = usage(history.ledger.database, ())

    assert (line.num_requests, line.amount, line.usage, line.energy_uj) == (0, 0, TokenUsage(), 0)


@pytest.mark.parametrize("dimensions", [("tenant",), ("build_id", "day"), ("day",)])
def test_allocated_lines_and_idle_add_up_to_the_machines_bill(history: History, dimensions: tuple[str, ...]) -> None:
    """Two machines for twenty minutes on four days, two days at each rate; the margin is what was billed beyond it."""
    report = cost(history.ledger.database, dimensions)  # type: ignore[arg-type] # names from the parametrization
    hours = 4 * 300 * NS_PER_S
    assert report.machine_bill == 2 * (360_000_000_000 + 720_000_000_000) * hours // (3600 * NS_PER_S)
    assert report.idle is not None
    assert sum(line.allocated or 0 for line in report.lines) + report.idle == report.machine_bill
    assert report.uptime_ns == 4 * hours
    assert report.idle_ns + sum(line.machine_ns for line in report.lines) == report.uptime_ns
    assert report.billed == sum(record.amount or 0 for record in history.records)
    assert report.margin == report.billed - report.machine_bill


def test_without_machine_time_or_a_rate_allocation_is_unknown_and_not_zero(ledger: Ledger) -> None:
    """Usage stands alone."""
    key = ledger.reserve(Reservation("acme", "r1", "small", "b", TokenUsage(10, 0, 10))).key
    ledger.settle(Settlement(key, TokenUsage(10, 0, 10), "stop"))
    report = cost(ledger.database, ("tenant",))

    assert (report.machine_bill, report.idle, report.margin) == (None, None, None)
    assert [line.allocated for line in report.lines] == [None]


@pytest.mark.parametrize("seed", range(20))
def test_an_allocation_adds_up_even_when_more_was_busy_than_known(seed: int) -> None:
    """Idle is what is left, and never below nothing."""
    rng = random.Random(seed)
    busy = {name: rng.randrange(1000) for name in "abcd"[: rng.randrange(5)]}
    uptime, bill = rng.randrange(3000), Pico(rng.randrange(10**12))
    parts, idle = allocate(bill, uptime, busy)

    assert sum(parts.values()) + idle == bill
    assert idle >= 0
    assert idle == 0 or sum(busy.values()) < uptime or not any(busy.values())


def test_the_cost_of_a_build_is_per_million_output_tokens(history: History) -> None:
    """Machine time at each day's rate, without idle; a build that never ran has no cost, which is not 0."""
    report = build_cost(history.ledger.database, "small-build")
    mine = [record for record in history.records if record.build_id == "small-build"]
    tokens = sum(record.usage.num_output_tokens for record in mine)
    machine_ns = sum(record.share.machine_ns for record in mine if record.share)

    assert (report.num_requests, report.num_output_tokens, report.machine_ns) == (len(mine), tokens, machine_ns)
    assert report.billed_per_million == round(Fraction(sum(record.amount or 0 for record in mine) * 10**6, tokens))
    assert report.machine_amount is not None
    assert machine_ns < 10 * report.machine_amount < 2 * machine_ns  # 0.36 and 0.72 an hour
    assert report.machine_per_million == round(Fraction(report.machine_amount * 10**6, tokens))
    assert build_cost(history.ledger.database, "never").billed_per_million is None


def test_records_are_listed_newest_first(history: History) -> None:
    """All, or one tenant's."""
    acme = [record for record in history.records if record.key.tenant == "acme"]

    assert records(history.ledger.database, limit=5) == history.records[: -5 - 1 : -1]
    assert records(history.ledger.database, tenant="acme", limit=1000) == acme[::-1]
    assert records(history.ledger.database, since_ns=acme[-1].reserved_at_ns, tenant="acme") == [acme[-1]]


def test_the_focus_export_adds_up_and_leaves_unknown_costs_empty(history: History) -> None:
    """Costs are plain decimals; a price is quantity times unit price but for one rounding a request."""
    rows = focus_rows(history.ledger.database, "house")
    priced = [row for row in rows if row["BilledCost"]]
    total = sum(_pico(row["BilledCost"]) for row in priced)

    assert total == sum(record.amount or 0 for record in history.records)
    assert {row["SkuId"] for row in rows if not row["BilledCost"]} == {"mystery"}
    assert {row["SubAccountId"] for row in rows} == {"acme", "beta"}
    assert {row["BillingCurrency"] for row in priced} == {"USD"}
    first = rows[0]
    assert (first["ChargePeriodStart"], first["ChargePeriodEnd"]) == ("2025-06-01T00:00:00Z", "2025-06-02T00:00:00Z")
    assert (first["BillingPeriodStart"], first["BillingPeriodEnd"]) == ("2025-06-01T00:00:00Z", "2025-07-01T00:00:00Z")
    for row in priced:
        expected = float(row["PricingQuantity"]) * float(row["ListUnitPrice"])
        assert float(row["ListCost"]) == pytest.approx(expected, abs=1e-10)
        assert int(row["ConsumedQuantity"]) == round(float(row["PricingQuantity"]) * 10**6)


def _pico(text: str) -> int:
    whole, _, fraction = text.partition(".")
    return int(whole) * 10**12 + int(fraction.ljust(12, "0"))


def test_sums_beyond_64_bits_are_exact(ledger: Ledger) -> None:
    """Fifteen million units of a currency, in pico-units."""
    used = TokenUsage(0, 0, 10**6 * 10**6 // 2)  # 2 million USD each
    for number in range(8):
        tenant = f"t{number}"
        key = ledger.reserve(Reservation(tenant, "r", "small", "b", used)).key
        ledger.settle(Settlement(key, used, "stop"))
    (line,) = usage(ledger.database, ())

    assert line.amount == 16 * 10**6 * 10**12
