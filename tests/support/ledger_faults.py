"""Fault injection for the ledger: processes that meter requests are killed at random, and then the books are checked.

Run as a module it does so at length and prints ``{"requests", "lost", "double", "open"}``::

    python -m tests.support.ledger_faults --rounds 40
"""

from __future__ import annotations

import argparse
import json
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func
from sqlalchemy import select as select_rows

from enginehouse_backends.accounting.budgets import Budget, Limit
from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.ledger_meter import LedgerMeter
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_backends.accounting.schema import entries, holds
from enginehouse_backends.accounting.views import records, usage
from enginehouse_contract.usage import TokenUsage

BOOK = """\
currency: USD
effective_from: 2020-01-01T00:00:00Z
prices:
  - model: small
    input: "1"
    output: "4"
"""
REASONS = ("stop", "length", "cancelled", "timeout", "error")
_NUM_THREADS = 8
_MAX_START_S = 60.0


def num_output_tokens(request_id: str) -> int:
    """Return what the pretended engine generates for a request: the same in every process."""
    return random.Random(request_id).randrange(1, 40)


def write_requests(url: str, name: str) -> None:
    """Meter requests for ever, telling on stdout what the ledger has acknowledged."""
    meter = LedgerMeter(Ledger(url), progress_period_s=0.0)
    lock = threading.Lock()

    def tell(*words: object) -> None:
        with lock:
            sys.stdout.write(" ".join(map(str, words)) + "\n")
            sys.stdout.flush()

    def run(thread: int) -> None:
        number = 0
        while True:
            request_id = f"{name}-{thread}-{number}"
            number += 1
            request = meter.open(
                tenant=f"tenant{thread % 3}",
                request_id=request_id,
                model="small",
                build_id="b",
                upper_bound=TokenUsage(10, 0, 40),
                attempt=1,
            )
            tell("opened", request_id)
            total = num_output_tokens(request_id)
            for count in range(1, total, 5):
                request.progress(TokenUsage(10, 0, count))
                pending = request._state.pending
                assert pending is not None, "every count is made durable"
                pending.result()
                tell("counted", request_id, count)
            request.settle(TokenUsage(10, 0, total), REASONS[total % len(REASONS)])
            tell("settled", request_id, total)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()


@dataclass
class Told:
    """What killed processes had said before they died."""

    opened: set[str] = field(default_factory=set)
    counted: dict[str, int] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)

    def hear(self, output: str) -> None:
        """Read one process's output; its last line may be torn."""
        for line in output.splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            what, request_id, *count = line.split()
            if what == "opened":
                self.opened.add(request_id)
            elif what == "counted":
                self.counted[request_id] = int(count[0])
            else:
                self.settled[request_id] = int(count[0])


def run_and_kill(url: str, num_rounds: int, rng: random.Random) -> Told:
    """Start a writer, kill it at a random moment, and start over; two writers at once every other time."""
    told = Told()
    for number in range(num_rounds):
        writers = [_start(url, f"{number}-{twin}") for twin in range(1 + number % 2)]
        for writer in writers:
            assert writer.stdout is not None, "it was asked for"
            select.select([writer.stdout], [], [], _MAX_START_S)  # until it has opened its first request
        time.sleep(rng.random())
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            output, error = writer.communicate()
            assert writer.returncode == -signal.SIGKILL, error.decode()
            told.hear(output.decode())
    return told


def _start(url: str, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.ledger_faults", "--write", url, "--name", name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603 - our own module


def audit(ledger: Ledger, told: Told) -> dict[str, int]:
    """Compare the books with what was told; 0 everywhere but in ``requests`` is what must be."""
    found = records(ledger.database, limit=10**9)
    times = Counter(record.key.request_id for record in found)
    wrong = 0
    for record in found:
        request_id, count = record.key.request_id, record.usage.num_output_tokens
        least = told.settled.get(request_id, told.counted.get(request_id, 0))
        most = told.settled.get(request_id, num_output_tokens(request_id))
        wrong += not least <= count <= most
        wrong += record.amount != record.usage.num_input_tokens * 10**6 + count * 4 * 10**6
    with ledger.database.connect() as connection:
        num_reservations = connection.execute(
            select_rows(func.count()).where(entries.c.kind == "reservation")
        ).scalar_one()
        num_open = connection.execute(select_rows(func.count()).select_from(holds)).scalar_one()
    lines = usage(ledger.database, ())
    summed = sum((line.usage for line in lines), start=TokenUsage())
    wrong += summed != sum((record.usage for record in found), start=TokenUsage())
    return {
        "requests": len(times),
        "lost": len(told.opened - times.keys()) + num_reservations - len(times),
        "double": len(found) - len(times),
        "open": num_open,
        "wrong": wrong,
    }


def run_faults(url: str, num_rounds: int, seed: int) -> dict[str, int]:
    """Kill writers on a new ledger, recover it, and audit it."""
    with Ledger(url) as ledger:
        ledger.add_price_book(parse_price_book(BOOK))
        ledger.set_budget(Budget("tenant1", "day", spend=Limit(hard=10**15)))
        told = run_and_kill(url, num_rounds, random.Random(seed))
        ledger.recover()
        return audit(ledger, told)


def main() -> None:
    """Run as a writer, or at length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", metavar="URL")
    parser.add_argument("--name", default="")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments: Any = parser.parse_args()
    if arguments.write:
        write_requests(arguments.write, arguments.name)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = run_faults(f"sqlite:///{Path(folder) / 'ledger.db'}", arguments.rounds, arguments.seed)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
