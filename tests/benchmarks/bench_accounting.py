"""What accounting costs: a server with it over one without, and the ledger alone.

    python tests/benchmarks/bench_accounting.py [--url postgresql://...] [--records 1000000]

``rate_ratio`` and ``added_ttft_ms`` compare two servers of one build, with accounting and without, in alternating
pairs: tokens per second at 32 streams, and time to first token at idle. ``settlements_per_s`` is the ledger alone:
every request is reserved and settled, each durable before the next step (SQLite: WAL, every commit flushed), with
``--in-flight`` requests under way at once; tenants have a budget per day and a quota per minute. ``view_s`` is the
slowest view over ``--records`` records. The last line is one JSON object; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench_frontdoor import NUM_STREAMS, NUM_TOKENS, PROMPTS, front_door_first_token_s, front_door_rate
from sqlalchemy import insert, text
from tests.support.servers import running_server

from enginehouse_backends.accounting import setup
from enginehouse_backends.accounting.budgets import Budget, Limit
from enginehouse_backends.accounting.focus import focus_rows
from enginehouse_backends.accounting.ledger import Ledger, MachineTime
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.records import RequestKey, RequestTimes, Reservation, Settlement, UsageRecord
from enginehouse_backends.accounting.rows import settlement_row
from enginehouse_backends.accounting.schema import entries
from enginehouse_backends.accounting.settling import add_to_days
from enginehouse_backends.accounting.views import build_cost, cost, records, usage
from enginehouse_backends.accounting.windows import NS_PER_S
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_contract.money import Pico
from enginehouse_contract.settings import Settings, load_settings
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_ROUNDS = 5
NUM_TENANTS = 20
NUM_DAYS = 90
NUM_VIEW_RUNS = 3
NUM_SERVER_ROUNDS = 7
NUM_FIRST_TOKENS = 41
BATCH = 20_000
BOOK = """\
currency: USD
effective_from: 2020-01-01T00:00:00Z
machine_per_hour: "0.36"
prices:
  - model: small
    input: "0.05"
    cached_input: "0.0125"
    output: "0.20"
  - model: smollm2
    input: "0.05"
    cached_input: "0.0125"
    output: "0.20"
"""


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an empty database; default: SQLite in a temporary folder")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=8000, help="per round")
    parser.add_argument("--in-flight", type=int, default=128)
    options = parser.parse_args()
    rate_ratio, added_ttft_ms = measure_servers()
    with tempfile.TemporaryDirectory() as folder:
        url = options.url or f"sqlite:///{Path(folder) / 'ledger.db'}"
        with Ledger(url) as ledger:
            ledger.add_price_book(parse_price_book(BOOK))
            for number in range(NUM_TENANTS):
                ledger.set_budget(Budget(f"tenant{number}", "day", spend=Limit(hard=10**18)))
                ledger.set_budget(Budget(f"tenant{number}", "minute", requests=Limit(hard=10**9)))
            fill(ledger, options.records)
            rates = [measure_rate(ledger, options.requests, options.in_flight, number) for number in range(NUM_ROUNDS)]
            say(f"settled requests per second: {', '.join(f'{rate:.0f}' for rate in rates)}")
            views = {name: measure_view(view) for name, view in views_of(ledger).items()}
        for name, seconds in views.items():
            say(f"{name}: {seconds:.3f} s")
    served = {"rate_ratio": round(rate_ratio, 3), "added_ttft_ms": round(added_ttft_ms, 2)}
    result = {**served, "settlements_per_s": round(median(rates)), "view_s": round(max(views.values()), 3)}
    say(json.dumps(result))


def measure_servers() -> tuple[float, float]:
    """Return the token rate with accounting over without, and the milliseconds it adds to the first token."""
    settings = load_settings()
    build_dir = build_engine(BuildOptions(model=fetch_demo_model(settings.cache_dir)), settings.store_dir).build_dir
    parameters = {"enable_kv_cache_reuse": "false"}
    rates, firsts = [], []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "on")
        with setup.open_ledger(Settings(home)) as ledger:
            ledger.add_price_book(parse_price_book(BOOK))
            ledger.set_budget(Budget("default", "day", spend=Limit(hard=10**18)))
        with (
            running_server(build_dir, home, parameters) as on,
            running_server(build_dir, Path(folder, "off"), parameters, accounting="off") as off,
        ):
            for number in range(NUM_SERVER_ROUNDS + 1):
                pair = {}
                for server in (on, off) if number % 2 else (off, on):
                    pair[server is on] = asyncio.run(front_door_rate(server, PROMPTS, NUM_TOKENS))
                if number:  # the first warms up
                    rates.append(pair[True] / pair[False])
            for number in range(NUM_FIRST_TOKENS):
                prompt = PROMPTS[number % NUM_STREAMS]
                times_s = {}
                for server in (on, off) if number % 2 else (off, on):
                    times_s[server is on] = front_door_first_token_s(server, prompt)
                firsts.append(1000 * (times_s[True] - times_s[False]))
    say(f"tokens per second with accounting over without: {', '.join(f'{rate:.3f}' for rate in rates)}")
    return median(rates), median(firsts)


def fill(ledger: Ledger, num_records: int) -> None:
    """Write settlements of the last days, many at a time, with their daily sums."""
    rng = random.Random(0)
    now_ns = time.time_ns()
    book_id = ledger.price_list().books[0].book_id
    for start in range(0, num_records, BATCH):
        batch = list(_records(rng, range(start, min(start + BATCH, num_records)), num_records, now_ns, book_id))
        with ledger.database.begin() as connection:
            connection.execute(insert(entries), [settlement_row(record) for record in batch])
            add_to_days(connection, batch, 0)
    with ledger.database.begin() as connection:
        if ledger.database.dialect.name == "postgresql":
            connection.execute(text("ANALYZE"))
    ledger.record_machine_time(MachineTime("m1", 3600 * NS_PER_S))


def _records(rng: random.Random, numbers: range, num_records: int, now_ns: int, book_id: str) -> Iterator[UsageRecord]:
    for number in numbers:
        age_ns = (num_records - number) * NUM_DAYS * 86_400 * NS_PER_S // num_records
        used = TokenUsage(rng.randrange(2000), rng.randrange(500), rng.randrange(500))
        prices = ("0.05", "0.0125", "0.20")
        amount = used.num_input_uncached_tokens * 50_000 + used.num_input_cached_tokens * 12_500
        yield UsageRecord(
            key=RequestKey(f"tenant{rng.randrange(NUM_TENANTS)}", f"old-{number}", 1),
            key_id="",
            model="small",
            build_id=f"sha256:{rng.randrange(8)}",
            usage=used,
            finish_reason="stop",
            amount=Pico(amount + used.num_output_tokens * 200_000),
            currency="USD",
            book_id=book_id,
            unit_prices=prices,
            times=RequestTimes(),
            share=None,
            reserved_at_ns=now_ns - age_ns,
            settled_at_ns=now_ns - age_ns,
        )


def measure_rate(ledger: Ledger, num_requests: int, in_flight: int, number: int) -> float:
    """Reserve and settle requests from as many threads as may be under way; return how many a second."""

    def run(thread: int) -> None:
        for index in range(num_requests // in_flight):
            tenant, request_id = f"tenant{(thread + index) % NUM_TENANTS}", f"{number}-{thread}-{index}"
            admission = ledger.reserve(Reservation(tenant, request_id, "small", "sha256:1", TokenUsage(500, 0, 200)))
            ledger.settle(Settlement(admission.key, TokenUsage(400, 100, 150), "stop"))

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(in_flight)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_requests // in_flight * in_flight / (time.perf_counter() - started_s)


def views_of(ledger: Ledger) -> dict[str, Callable[[], Any]]:
    """Return every view."""
    database = ledger.database
    return {
        "usage by tenant and model": lambda: usage(database, ("tenant", "model")),
        "usage by everything": lambda: usage(database, ("tenant", "model", "build_id", "day")),
        "cost by tenant": lambda: cost(database, ("tenant",)),
        "cost by build and day": lambda: cost(database, ("build_id", "day")),
        "cost of a build": lambda: build_cost(database, "sha256:1"),
        "FOCUS export": lambda: focus_rows(database, "house"),
        "latest records": lambda: records(database, limit=1000),
        "latest records of a tenant": lambda: records(database, tenant="tenant7", limit=1000),
        "budgets": ledger.budgets,
    }


def measure_view(view: Callable[[], Any]) -> float:
    """Return the median time of a view, in seconds."""
    times_s = []
    for _ in range(NUM_VIEW_RUNS):
        started_s = time.perf_counter()
        view()
        times_s.append(time.perf_counter() - started_s)
    return median(times_s)


if __name__ == "__main__":
    main()
