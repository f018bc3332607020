"""Budgets: what fits is admitted, nothing more, whoever asks at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select
from tests.backends.accounting.conftest import BOOK, Clock

from enginehouse_backends.accounting.budgets import Budget, Limit
from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.records import RequestKey, Reservation, Settlement
from enginehouse_backends.accounting.schema import budget_windows
from enginehouse_backends.accounting.windows import NS_PER_S
from enginehouse_contract.errors import BudgetExceededError, ConfigurationError
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

NOON_NS = 1_749_376_800 * NS_PER_S  # 2025-06-08T10:00:00Z, noon in Berlin
UPPER_BOUND = TokenUsage(1000, 0, 250)  # 0.002 USD
PRICE = 2_000_000_000


@pytest.fixture
def clock() -> Clock:
    """Stand still at noon."""
    return Clock(NOON_NS)


@pytest.fixture
def ledger(ledger_url: str, clock: Clock) -> Iterator[Ledger]:
    """Open a ledger at noon."""
    with Ledger(ledger_url, clock=clock) as opened:
        opened.add_price_book(parse_price_book(BOOK))
        yield opened


def ask(ledger: Ledger, request_id: str, tenant: str = "acme", key_id: str = "", model: str = "small") -> RequestKey:
    """Reserve the upper bound of one request."""
    return ledger.reserve(Reservation(tenant, request_id, model, "b", UPPER_BOUND, attempt=1, key_id=key_id)).key


def windows(ledger: Ledger) -> dict[str, tuple[int, int, int, int]]:
    """Return spent, held, requests and tokens by kind of window."""
    with ledger.database.connect() as connection:
        rows = connection.execute(select(budget_windows).order_by(budget_windows.c.start_ns)).all()
        return {row.window: (row.spent, row.held, row.num_requests, row.num_tokens) for row in rows}


def test_a_reservation_holds_and_a_settlement_frees_the_rest(ledger: Ledger) -> None:
    """Held is the upper bound, spent the amount; tokens follow the usage; a release gives everything back."""
    ledger.set_budget(Budget("acme", "day", spend=Limit(hard=10**12)))
    key = ask(ledger, "r1")
    assert windows(ledger) == {"day": (0, PRICE, 1, 1250)}
    ledger.settle(Settlement(key, TokenUsage(900, 100, 10), "stop"))
    assert windows(ledger) == {"day": (900 * 10**6 + 100 * 250_000 + 10 * 4 * 10**6, 0, 1, 1010)}
    ledger.reverse(key, "a mistake")
    assert windows(ledger) == {"day": (0, 0, 0, 0)}
    ledger.release(ask(ledger, "r2"), "overloaded")
    assert windows(ledger) == {"day": (0, 0, 0, 0)}


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            Budget("acme", "day", time_zone="Europe/Berlin", spend=Limit(hard=2 * PRICE + 1)),
            (
                "`budget` is used up: spend per day of tenant acme has 0.000000000001 left and resets at "
                "2025-06-09T00:00:00+02:00; limit 0.004000000001, given 0.002."
            ),
        ),
        (
            Budget("acme", "minute", requests=Limit(hard=2)),
            (
                "`budget` is used up: requests per minute of tenant acme has 0 left and resets at "
                "2025-06-08T10:01:00+00:00; limit 2, given 1."
            ),
        ),
        (
            Budget("acme", "month", key_id="web", tokens=Limit(hard=3000)),
            (
                "`budget` is used up: tokens per month of tenant acme, key web has 500 left and resets at "
                "2025-07-01T00:00:00+00:00; limit 3000, given 1250."
            ),
        ),
    ],
)
def test_a_refusal_says_which_limit_what_is_left_and_when_it_resets(
    ledger: Ledger, budget: Budget, message: str
) -> None:
    """And nothing of it is held."""
    ledger.set_budget(budget)
    ask(ledger, "r1", key_id="web")
    ask(ledger, "r2", key_id="web")
    before = windows(ledger)
    with pytest.raises(BudgetExceededError) as caught:
        ask(ledger, "r3", key_id="web")

    assert str(caught.value) == message
    assert caught.value.retry_after_s == (budget.window_at(NOON_NS).end_ns - NOON_NS) / NS_PER_S
    assert windows(ledger) == before


def test_a_refusal_by_one_window_gives_back_what_the_others_held(ledger: Ledger) -> None:
    """All or nothing, over every window of the tenant and of the key."""
    for window in ("minute", "hour", "day", "week", "month"):
        ledger.set_budget(Budget("acme", window, spend=Limit(hard=(1 if window == "week" else 100) * PRICE)))
    ledger.set_budget(Budget("acme", "day", key_id="web", requests=Limit(hard=9)))
    ask(ledger, "r1", key_id="web")
    before = windows(ledger)
    with pytest.raises(BudgetExceededError, match="spend per week"):
        ask(ledger, "r2", key_id="web")

    assert windows(ledger) == before
    assert set(before.values()) == {(0, PRICE, 1, 1250)}


def test_budgets_of_keys_and_tenants_are_their_own(ledger: Ledger) -> None:
    """A key's limit binds that key; a tenant's limit all its keys; others are free."""
    ledger.set_budget(Budget("acme", "day", key_id="web", requests=Limit(hard=1)))
    ledger.set_budget(Budget("acme", "day", requests=Limit(hard=3)))
    ask(ledger, "r1", key_id="web")
    with pytest.raises(BudgetExceededError, match="key web"):
        ask(ledger, "r2", key_id="web")
    ask(ledger, "r3", key_id="app")
    ask(ledger, "r4")
    with pytest.raises(BudgetExceededError, match="requests per day of tenant acme has 0 left"):
        ask(ledger, "r5", key_id="app")

    assert ask(ledger, "r6", tenant="other", key_id="web").tenant == "other"


def test_a_window_that_ends_frees_its_budget_and_a_clock_set_back_does_not(ledger: Ledger, clock: Clock) -> None:
    """What was spent in a window stays spent in it."""
    ledger.set_budget(Budget("acme", "minute", requests=Limit(hard=1)))
    ask(ledger, "r1")
    clock.now_ns += 60 * NS_PER_S
    late = ask(ledger, "r2")
    clock.now_ns -= 60 * NS_PER_S
    with pytest.raises(BudgetExceededError):
        ask(ledger, "r3")
    ledger.settle(Settlement(late, TokenUsage(10, 0, 1), "stop"))
    clock.now_ns += 7 * 24 * 3600 * NS_PER_S

    assert ask(ledger, "r4").request_id == "r4"


def test_a_new_budget_counts_what_its_window_saw_before(ledger: Ledger) -> None:
    """Settled and open requests of the window count; a removed budget counts for nothing."""
    ledger.settle(Settlement(ask(ledger, "r1"), TokenUsage(1000, 0, 250), "stop"))
    ask(ledger, "r2")
    ledger.set_budget(Budget("acme", "day", spend=Limit(hard=3 * PRICE)))
    ask(ledger, "r3")
    with pytest.raises(BudgetExceededError):
        ask(ledger, "r4")

    assert windows(ledger) == {"day": (PRICE, 2 * PRICE, 3, 3750)}
    assert ledger.remove_budget("acme", "", "day")
    assert not ledger.remove_budget("acme", "", "day")
    assert ask(ledger, "r4").request_id == "r4"


def test_a_soft_limit_is_reported_and_admits(ledger: Ledger) -> None:
    """One sentence for each limit that is passed."""
    ledger.set_budget(Budget("acme", "day", spend=Limit(soft=PRICE), requests=Limit(soft=1)))
    reservation = Reservation("acme", "r1", "small", "b", UPPER_BOUND)
    assert ledger.reserve(reservation).soft_limits == ()

    assert ledger.reserve(Reservation("acme", "r2", "small", "b", UPPER_BOUND)).soft_limits == (
        "spend per day of tenant acme is 0.004, over its soft limit 0.002",
        "requests per day of tenant acme is 2, over its soft limit 1",
    )


def test_without_a_price_nothing_runs_against_a_limit_on_spend(ledger: Ledger) -> None:
    """What cannot be priced cannot be shown to fit; tenants without such a limit are served."""
    ledger.add_price_book(parse_price_book(BOOK.replace("2020", "2021") + "unknown_model: 'null'\n"))
    ledger.set_budget(Budget("acme", "day", spend=Limit(hard=10**12)))
    with pytest.raises(BudgetExceededError, match="`model` has no price, and tenant acme has a limit on spend per day"):
        ask(ledger, "r1", model="mystery")

    assert ask(ledger, "r1", tenant="other", model="mystery").tenant == "other"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": "year"}, "`window` must be one of minute, hour, day, week, month; given year"),
        ({"time_zone": "Nowhere"}, "`time_zone` is unknown"),
        ({"spend": Limit(hard=-1)}, "`hard_spend` is out of range"),
        ({"tokens": Limit(soft=2**63)}, "`soft_tokens` is out of range"),
    ],
)
def test_a_wrong_budget_is_refused(values: dict[str, object], message: str) -> None:
    """The refusal names the field."""
    with pytest.raises(ConfigurationError) as caught:
        Budget(**{"tenant": "acme", "window": "day", **values})  # type: ignore[arg-type] # wrong on purpose

    assert message in str(caught.value)


def test_a_budget_reads_back_as_it_was_set(ledger: Ledger) -> None:
    """Setting it again replaces it."""
    budget = Budget("acme", "week", "web", "Asia/Tokyo", Limit(1, 2), Limit(None, 4), Limit(5, None))
    ledger.set_budget(Budget("acme", "week", "web"))
    ledger.set_budget(budget)

    assert ledger.budgets() == [budget]


def ask_many(url: str, name: str, num_requests: int, start: object) -> None:
    """Ask from several threads of one process, as soon as all processes are ready."""
    with Ledger(url, owner=name, clock=Clock(NOON_NS)) as ledger, ThreadPoolExecutor(8) as pool:
        start.wait()  # type: ignore[attr-defined] # a barrier of multiprocessing

        def one(number: int) -> None:
            with contextlib.suppress(BudgetExceededError):
                ask(ledger, f"{name}-{number}")

        assert len(list(pool.map(one, range(num_requests)))) == num_requests


def test_parallel_processes_at_the_edge_admit_exactly_what_fits(ledger: Ledger, ledger_url: str) -> None:
    """Three limits in two windows; the tightest decides, to the request."""
    ledger.set_budget(Budget("acme", "day", spend=Limit(hard=37 * PRICE + PRICE // 2), requests=Limit(hard=60)))
    ledger.set_budget(Budget("acme", "month", tokens=Limit(hard=50 * 1250)))
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(4)
    processes = [context.Process(target=ask_many, args=(ledger_url, f"p{n}", 30, start)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0] * 4
    assert windows(ledger) == {"day": (0, 37 * PRICE, 37, 37 * 1250), "month": (0, 37 * PRICE, 37, 37 * 1250)}
