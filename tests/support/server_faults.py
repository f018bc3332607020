"""Fault injection for a whole server: its processes are killed under load, it starts again, and the books are checked.

Run as a module it does so at length, together with :mod:`tests.support.ledger_faults`, and prints
``{"requests", "lost", "double", "open"}``::

    python -m tests.support.server_faults --rounds 20
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select
from tests.support import ledger_faults
from tests.support.metrics import read_gauge, wait_for_gauge
from tests.support.servers import instant_server
from tests.support.stubs import kill_server, kill_stubs

from enginehouse_backends.accounting import setup, views
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.schema import entries, holds
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_client import Client
from enginehouse_contract.errors import EnginehouseError
from enginehouse_contract.settings import Settings, load_settings

if TYPE_CHECKING:
    from tests.support.servers import RunningServer

    from enginehouse_backends.accounting.ledger import Ledger

BOOK = """\
currency: USD
effective_from: 2020-01-01T00:00:00Z
prices:
  - model: smollm2
    input: "1"
    output: "4"
"""
VICTIMS = ("nobody", "server", "tensorrt_llm", "tensorrt_llm_bls")
_NUM_CLIENTS = 8
_MAX_TOKENS = 600


@dataclass
class Told:
    """What clients saw. A request of which something was seen must have a record."""

    seen: set[str] = field(default_factory=set)
    answered: dict[str, int] = field(default_factory=dict)  # request id -> output tokens that its last response told


class Load:
    """Clients that stream, leave early, time out, ask for the impossible, and are cut off."""

    def __init__(self, server: RunningServer, name: str, told: Told) -> None:
        self._server = server
        self._name = name
        self._told = told
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(_NUM_CLIENTS)]

    def start(self) -> None:
        """Start all clients."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each client finish its request."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for all clients."""
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        rng = random.Random(f"{self._name}/{number}")
        url = self._server.grpc_url if number % 2 else self._server.http_url
        with Client(url, max_retries=0) as client:
            count = 0
            while not self._stopping.is_set():
                count += 1
                try:
                    self._request(client, rng, f"{self._name}-{number}-{count}")
                except EnginehouseError:
                    time.sleep(0.02)  # refused, or cut off

    def _request(self, client: Client, rng: random.Random, request_id: str) -> None:
        kind = rng.random()
        options: dict[str, Any] = {"max_tokens": rng.randrange(1, _MAX_TOKENS), "extra_inputs": {"end_id": -1}}
        if kind < 0.1:
            options["top_p"] = 7.0
        elif kind < 0.2:
            options["timeout_ms"] = 5
        leave_after = rng.randrange(1, 5) if kind > 0.7 else None
        chunks = client.generate_stream("x" * rng.randrange(1, 40), request_id=request_id, timeout_s=15, **options)
        with closing(chunks):
            for count, chunk in enumerate(chunks, 1):
                self._told.seen.add(request_id)
                if chunk.finish_reason is not None and chunk.usage.num_output_tokens is not None:
                    self._told.answered[request_id] = chunk.usage.num_output_tokens
                if count == leave_after:
                    break


def run_round(server: RunningServer, name: str, victim: str, rng: random.Random, told: Told) -> int | None:
    """Load a server and kill *victim*; return the tokens the engine says it generated, unless something was killed."""
    load = Load(server, name, told)
    load.start()
    time.sleep(1.5 + rng.random())
    if victim == "server":
        kill_server(server)
    elif victim != "nobody":
        kill_stubs(server, victim)
        time.sleep(1.0)
    load.stop()
    if victim == "tensorrt_llm_bls":
        kill_server(server)  # the streams of a dead front door hang until their server goes
    load.join()
    if victim != "nobody":
        return None
    wait_for_gauge(server, "nv_trt_llm_request_metrics", "active", 0)
    wait_for_gauge(server, "nv_llm_front_door_rows", "active", 0)
    return int(read_gauge(server, "nv_llm_output_token_len_sum", "total_output_tokens") or 0)


def run_faults(build_dir: Path, home: Path, rounds: int, seed: int, ledger_url: str = "") -> dict[str, int]:
    """Run rounds with a random victim each, on one state folder, and audit the books."""
    rng = random.Random(seed)
    told = Told()
    num_wrong = 0
    settings = Settings(home, ledger_url=ledger_url)
    with setup.open_ledger(settings) as ledger:
        ledger.add_price_book(parse_price_book(BOOK))
        for number in range(rounds):
            victim = VICTIMS[number % len(VICTIMS)]
            with instant_server(build_dir, home, ledger_url=ledger_url) as server:
                settled_before = _generated(ledger)  # what the last round left open was settled at this start
                num_generated = run_round(server, f"round{number}", victim, rng, told)
            if num_generated is not None:
                num_wrong += _generated(ledger) - settled_before != num_generated
        ledger.recover()
        return {**audit(ledger, told), "wrong_totals": num_wrong}


def _generated(ledger: Ledger) -> int:
    usage = [line.usage for line in views.usage(ledger.database, ())]
    return sum(each.num_output_tokens + each.num_discarded_tokens for each in usage)


def audit(ledger: Ledger, told: Told) -> dict[str, int]:
    """Compare the books with what clients saw; 0 everywhere but in ``requests`` is what must be."""
    records = views.records(ledger.database, limit=10**9)
    counts = Counter(record.key.request_id for record in records)
    tokens = {record.key.request_id: record.usage.num_output_tokens for record in records}
    with ledger.database.connect() as connection:
        counted = connection.execute(select(entries.c.kind, func.count()).group_by(entries.c.kind))
        by_kind = {row[0]: row[1] for row in counted}
        num_open = connection.execute(select(func.count()).select_from(holds)).scalar_one()
    reserved = by_kind.get("reservation", 0)
    return {
        "requests": reserved,
        "lost": len(told.seen - counts.keys()) + reserved - len(records) - by_kind.get("release", 0),
        "double": len(records) - len(counts),
        "open": num_open,
        "wrong_tokens": sum(tokens.get(request_id) != count for request_id, count in told.answered.items()),
    }


def main() -> None:
    """Run both kinds of fault at length and print what was lost, written twice and left open."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="of a whole server; twice as many of the ledger alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = load_settings()
    build_dir = build_engine(BuildOptions(model=fetch_demo_model(settings.cache_dir)), settings.store_dir).build_dir
    with tempfile.TemporaryDirectory() as folder:
        alone = ledger_faults.run_faults(f"sqlite:///{Path(folder, 'alone.db')}", 2 * options.rounds, options.seed)
        sys.stdout.write(f"processes that meter: {json.dumps(alone)}\n")
        served = run_faults(build_dir, Path(folder, "home"), options.rounds, options.seed)
        sys.stdout.write(f"a whole server: {json.dumps(served)}\n")
    wrong = alone["wrong"] + served["wrong_tokens"] + served["wrong_totals"]
    result = {name: alone[name] + served[name] for name in ("requests", "lost", "double", "open")}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(1 if wrong or result["lost"] or result["double"] or result["open"] else 0)


if __name__ == "__main__":
    main()
