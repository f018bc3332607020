"""Random histories against an oracle: a plain dictionary that computes everything anew, slowly."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from sqlalchemy import func, select
from tests.backends.accounting.conftest import BOOK, Clock

from enginehouse_backends.accounting.budgets import Budget, Limit
from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.records import RequestKey, Reservation, Settlement
from enginehouse_backends.accounting.schema import budget_windows, entries, holds
from enginehouse_backends.accounting.views import usage
from enginehouse_backends.accounting.windows import NS_PER_S
from enginehouse_contract.errors import BudgetExceededError, EnginehouseError, LedgerConflictError
from enginehouse_contract.usage import TokenUsage

START_NS = 1_749_376_800 * NS_PER_S
BUDGETS = [
    Budget("acme", "minute", requests=Limit(hard=6)),
    Budget("acme", "day", time_zone="Europe/Berlin", spend=Limit(hard=10_000_000)),
    Budget("acme", "hour", key_id="web", tokens=Limit(hard=40)),
    Budget("beta", "day", tokens=Limit(hard=200)),
]


def price(used: TokenUsage) -> int:
    """Price by the book of these tests, in pico-units."""
    uncached, cached, output = used.num_input_uncached_tokens, used.num_input_cached_tokens, used.num_output_tokens
    return uncached * 10**6 + cached * 250_000 + output * 4 * 10**6


@dataclass
class Known:
    """What the oracle knows of one request attempt."""

    reservation: Reservation
    at_ns: int
    durable: TokenUsage = field(default_factory=TokenUsage)
    settlement: Settlement | None = None
    released: str | None = None
    reversed: str | None = None

    def counted(self) -> TokenUsage:
        """Return the tokens that count against budgets."""
        if self.released is not None or self.reversed is not None:
            return TokenUsage()
        return self.reservation.upper_bound if self.settlement is None else self.settlement.usage


class Oracle:
    """A ledger as a dictionary."""

    def __init__(self) -> None:
        self.known: dict[RequestKey, Known] = {}

    def used(self, budget: Budget, at_ns: int) -> tuple[int, int, int]:
        """Return spend (with what is held), requests and tokens in a budget's window."""
        window = budget.window_at(at_ns)
        members = [
            it
            for it in self.known.values()
            if it.reservation.tenant == budget.tenant
            and budget.key_id in {"", it.reservation.key_id}
            and window.start_ns <= it.at_ns < window.end_ns
        ]
        counted = [it.counted() for it in members]
        num_requests = sum(it.released is None and it.reversed is None for it in members)
        tokens = sum(used.num_input_tokens + used.num_output_tokens for used in counted)
        return sum(price(used) for used in counted), num_requests, tokens

    def reserve(self, key: RequestKey, reservation: Reservation, at_ns: int) -> type[EnginehouseError] | None:
        """Admit or refuse."""
        if (it := self.known.get(key)) is not None:
            same = (it.reservation.key_id, it.reservation.upper_bound) == (reservation.key_id, reservation.upper_bound)
            return None if same else LedgerConflictError
        bound = reservation.upper_bound
        more = (price(bound), 1, bound.num_input_tokens + bound.num_output_tokens)
        for budget in BUDGETS:
            if budget.tenant == reservation.tenant and budget.key_id in {"", reservation.key_id}:
                limits = (budget.spend.hard, budget.requests.hard, budget.tokens.hard)
                for used, added, limit in zip(self.used(budget, at_ns), more, limits, strict=True):
                    if limit is not None and used + added > limit:
                        return BudgetExceededError
        self.known[key] = Known(reservation, at_ns)
        return None

    def settle(self, settlement: Settlement) -> type[EnginehouseError] | None:
        """Settle once."""
        it = self.known.get(settlement.key)
        if it is None or it.released is not None:
            return LedgerConflictError
        if it.settlement is not None:
            same = (it.settlement.usage, it.settlement.finish_reason) == (settlement.usage, settlement.finish_reason)
            return None if same else LedgerConflictError
        it.settlement = settlement
        return None

    def withdraw(self, key: RequestKey, reason: str, *, is_release: bool) -> type[EnginehouseError] | None:
        """Release or reverse once."""
        it = self.known.get(key)
        before = it and (it.released if is_release else it.reversed)
        if before is not None:
            return None if before == reason else LedgerConflictError
        if it is None or (it.settlement is not None) == is_release or (is_release and it.released is not None):
            return LedgerConflictError
        if is_release:
            it.released = reason
        else:
            it.reversed = reason
        return None


def outcome(call: object, *arguments: object) -> type[EnginehouseError] | None:
    """Return the class of the error a call raises, None when it raises none."""
    try:
        call(*arguments)  # type: ignore[operator] # a bound method
    except EnginehouseError as error:
        return type(error)
    return None


@pytest.mark.parametrize("seed", range(6))
def test_random_histories_agree_with_the_oracle(ledger_url: str, seed: int) -> None:
    """Every outcome, every window, every sum; the clock jumps ahead, and sometimes back."""
    rng = random.Random(seed)
    clock = Clock(START_NS)
    oracle = Oracle()
    owner = "first"
    ledger = Ledger(ledger_url, owner=owner, clock=clock)
    ledger.add_price_book(parse_price_book(BOOK))
    for budget in BUDGETS:
        ledger.set_budget(budget)
    for step in range(350):
        clock.now_ns += rng.choice((0, 1, 10, 40, 900, -30)) * NS_PER_S
        key = RequestKey(rng.choice(("acme", "beta", "free")), f"r{rng.randrange(60)}", rng.choice((1, 1, 1, 2)))
        tokens = TokenUsage(rng.randrange(6), rng.randrange(3), rng.randrange(6))
        action = rng.random()
        if action < 0.45:
            bound = TokenUsage(rng.randrange(4, 7), 0, rng.randrange(4, 6))
            reservation = Reservation(*key[:2], "small", "b", bound, key.attempt, rng.choice(("", "web")))
            assert outcome(ledger.reserve, reservation) == oracle.reserve(key, reservation, clock.now_ns), step
        elif action < 0.55:
            ledger.progress(key, tokens).result()
            if (it := oracle.known.get(key)) is not None and it.settlement is None and it.released is None:
                it.durable = tokens
        elif action < 0.85:
            settlement = Settlement(key, tokens, rng.choice(("stop", "length", "cancelled", "timeout", "error")))
            assert outcome(ledger.settle, settlement) == oracle.settle(settlement), step
        elif action < 0.97:
            withdraw, is_release = rng.choice(((ledger.release, True), (ledger.reverse, False)))
            reason = rng.choice("ab")
            assert outcome(withdraw, key, reason) == oracle.withdraw(key, reason, is_release=is_release), step
        else:
            ledger.close()
            owner = f"owner {step}"
            ledger = Ledger(ledger_url, owner=owner, clock=clock)
            recovered = {record.key: record for record in ledger.recover(lambda _: False)}
            open_ones = {k: it for k, it in oracle.known.items() if it.settlement is None and it.released is None}
            assert recovered.keys() == open_ones.keys()
            for open_key, it in open_ones.items():
                it.settlement = Settlement(open_key, it.durable, "error")
                assert recovered[open_key].usage == it.durable
    with ledger:
        check(ledger, oracle)


def check(ledger: Ledger, oracle: Oracle) -> None:
    """Compare everything that is stored with the oracle."""
    known = oracle.known
    with ledger.database.connect() as connection:
        rows = connection.execute(select(budget_windows)).all()
        kinds = connection.execute(select(entries.c.kind, func.count().label("num")).group_by(entries.c.kind)).all()
        counts = {row.kind: row.num for row in kinds}
        num_holds = connection.execute(select(func.count()).select_from(holds)).scalar_one()
    for budget in BUDGETS:
        for row in rows:
            if (row.tenant, row.key_id, row.window) == (budget.tenant, budget.key_id, budget.window):
                assert (row.spent + row.held, row.num_requests, row.num_tokens) == oracle.used(budget, row.start_ns)
    assert counts.get("reservation", 0) == len(known)
    assert counts.get("settlement", 0) == sum(it.settlement is not None for it in known.values())
    assert counts.get("release", 0) == sum(it.released is not None for it in known.values())
    assert counts.get("reversal", 0) == sum(it.reversed is not None for it in known.values())
    assert num_holds == sum(it.settlement is None and it.released is None for it in known.values())
    for line in usage(ledger.database, ("tenant",)):
        members = [
            it.settlement.usage
            for key, it in known.items()
            if it.settlement is not None and it.reversed is None and key.tenant == line.group[0]
        ]
        assert line.usage == sum(members, start=TokenUsage())
        assert line.amount == sum(price(used) for used in members)
        assert line.num_requests == len(members)
