"""The books of a real server: every request has one record, on every exit, and tokens are the engine's own."""

from __future__ import annotations

import threading
import time
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc
from tests.support.metrics import read_gauge, wait_for_gauge
from tests.support.servers import running_server
from tests.support.stubs import kill_server, kill_stubs

from enginehouse_backends.accounting import setup, views
from enginehouse_backends.accounting.budgets import Budget, Limit
from enginehouse_backends.accounting.price_book import parse_price_book
from enginehouse_client import Client
from enginehouse_contract.errors import BudgetExceededError, EnginehouseError, InvalidRequestError
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.servers import RunningServer

    from enginehouse_backends.accounting.allocation import CostReport
    from enginehouse_backends.accounting.ledger import Ledger
    from enginehouse_backends.accounting.records import UsageRecord

pytestmark = [pytest.mark.integration, pytest.mark.model]

PROMPT = "The capital of France is"
BOOK = """\
currency: EUR
effective_from: 2020-01-01T00:00:00Z
machine_per_hour: "0.36"
energy_per_kwh: "0.30"
prices:
  - model: smollm2
    input: "1"
    cached_input: "0.25"
    output: "4"
"""
WATTS = {"machine_idle_watts": "20", "machine_active_watts": "65"}
ENDLESS = {"max_tokens": 4000, "extra_inputs": {"end_id": -1}}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A state folder whose ledger has a price book."""
    with setup.open_ledger(Settings(tmp_path)) as ledger:
        ledger.add_price_book(parse_price_book(BOOK))
    return tmp_path


@pytest.fixture
def server(smollm2_build: Path, home: Path) -> Iterator[RunningServer]:
    """A server of its own, since it may be killed."""
    with running_server(smollm2_build, home, WATTS) as running:
        yield running


@pytest.fixture
def ledger(home: Path) -> Iterator[Ledger]:
    """The server's ledger, seen from outside."""
    with setup.open_ledger(Settings(home)) as opened:
        yield opened


def wait_for_records(ledger: Ledger, count: int, timeout_s: float = 30.0) -> dict[str, UsageRecord]:
    """Wait until there are so many records; return them by request id."""
    deadline_s = time.monotonic() + timeout_s
    while len(found := views.records(ledger.database, limit=10_000)) < count:
        assert time.monotonic() < deadline_s, f"{len(found)} records, not {count}"
        time.sleep(0.05)
    assert len(found) == count
    return {record.key.request_id: record for record in found}


def test_every_exit_leaves_one_record_with_the_engines_counts(server: RunningServer, ledger: Ledger) -> None:
    """Stop, length, stop string, refusal, deadline, both ways of leaving: counts, money and energy add up."""
    with Client(server.grpc_url) as grpc, Client(server.http_url) as http:
        length = grpc.generate(PROMPT, max_tokens=9, request_id="length", tenant="a")
        stop = http.generate(PROMPT, max_tokens=60, stop=["Paris"], request_id="stop string", tenant="b")
        two = grpc.generate(PROMPT, max_tokens=5, n=2, seed=3, top_k=20, request_id="two", tenant="a")
        timeout = grpc.generate(PROMPT, timeout_ms=700, request_id="deadline", **ENDLESS)
        with pytest.raises(InvalidRequestError):
            grpc.generate(PROMPT, max_tokens=4, top_p=7.0, request_id="refused")
        for name, client in (("left grpc", grpc), ("left http", http)):
            chunks = client.generate_stream(PROMPT, request_id=name, **ENDLESS)
            next(chunks)
            chunks.close()
    records = wait_for_records(ledger, 7)
    wait_for_gauge(server, "nv_trt_llm_request_metrics", "active", 0)

    reasons = {name: record.finish_reason for name, record in records.items()}
    assert reasons == {
        "length": "length",
        "stop string": "stop",
        "two": "length",
        "deadline": "timeout",
        "refused": "error",
        "left grpc": "cancelled",
        "left http": "cancelled",
    }
    for name, answer in (("length", length), ("stop string", stop), ("two", two), ("deadline", timeout)):
        record = records[name]
        assert record.usage.num_output_tokens == sum(one.usage.num_output_tokens for one in answer.sequences)
        assert record.usage.num_input_tokens == answer.usage.num_input_tokens == 5
        assert answer.cost is not None
        assert record.amount is not None
        assert answer.cost.amount == Decimal(record.amount) / 10**12
        assert answer.cost.currency == "EUR"
        assert answer.cost.price_book_id == record.book_id
        assert answer.energy is not None
        assert record.share is not None
        assert answer.energy.joules == pytest.approx(record.share.energy_uj / 1e6)
        assert answer.energy.is_estimated
    generated = sum(record.usage.num_output_tokens + record.usage.num_discarded_tokens for record in records.values())
    assert generated == read_total(server, "nv_llm_output_token_len_sum", "total_output_tokens")
    assert records["refused"].usage.num_input_tokens == 0


def read_total(server: RunningServer, name: str, kind: str) -> int:
    """Read a counter that must be there."""
    value = read_gauge(server, name, kind)
    assert value is not None
    return int(value)


def test_the_machines_bill_is_what_requests_and_idling_cost(smollm2_build: Path, home: Path, ledger: Ledger) -> None:
    """Allocated parts and idle add up to the bill; busy time is the requests', measured by the engine."""
    with running_server(smollm2_build, home, WATTS) as server, Client(server.grpc_url) as client:
        for tenant in ("a", "b"):
            client.generate(PROMPT, max_tokens=20, tenant=tenant)
    report: CostReport = views.cost(ledger.database, ("tenant",), views.Period())

    assert report.machine_bill is not None
    assert report.idle is not None
    assert [line.group for line in report.lines] == [("a",), ("b",)]
    assert all(line.machine_ns > 0 for line in report.lines)
    allocated = [line.allocated for line in report.lines]
    assert sum(part for part in allocated if part is not None) + report.idle == report.machine_bill
    assert sum(line.machine_ns for line in report.lines) + report.idle_ns == report.uptime_ns


def test_a_spent_budget_refuses_and_says_when_it_is_back(server: RunningServer, ledger: Ledger) -> None:
    """Over both protocols, at once, with the limit and what is left; another tenant is served, a soft limit warns."""
    ledger.set_budget(Budget("poor", "day", tokens=Limit(hard=40)))
    ledger.set_budget(Budget("warned", "hour", requests=Limit(soft=0)))
    with Client(server.grpc_url) as grpc, Client(server.http_url) as http:
        assert grpc.generate(PROMPT, max_tokens=10, tenant="poor").finish_reason == "length"
        for client in (grpc, http):
            with pytest.raises(BudgetExceededError, match=r"25 left and resets at .* limit 40, given 35"):
                client.generate(PROMPT, max_tokens=30, tenant="poor")
        warned = grpc.generate(PROMPT, max_tokens=3, tenant="warned")

    assert len(warned.budget_warnings) == 1
    assert len(wait_for_records(ledger, 2)) == 2


def test_parallel_requests_at_a_budgets_edge_admit_what_fits(server: RunningServer, ledger: Ledger) -> None:
    """Sixteen at once, of which five fit."""
    ledger.set_budget(Budget("edge", "day", requests=Limit(hard=5)))
    outcomes: list[str] = []

    def ask() -> None:
        with Client(server.grpc_url, max_retries=0) as client:
            try:
                outcomes.append(str(client.generate(PROMPT, max_tokens=3, tenant="edge").finish_reason))
            except BudgetExceededError:
                outcomes.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes) == ["length"] * 5 + ["refused"] * 11


def open_streams(server: RunningServer, count: int) -> tuple[list[threading.Thread], list[EnginehouseError]]:
    """Start endless streams and wait until each has sent something; returns their threads and, later, their errors."""
    errors: list[EnginehouseError] = []
    started = threading.Semaphore(0)

    def stream(number: int) -> None:
        with Client(server.grpc_url, max_retries=0) as client:
            try:
                for _ in client.generate_stream(PROMPT, request_id=f"open {number}", **ENDLESS):
                    started.release()
            except EnginehouseError as error:
                errors.append(error)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for _ in range(8 * count):
        assert started.acquire(timeout=60)
    return threads, errors


def test_a_killed_engines_requests_are_settled_with_what_came(server: RunningServer, ledger: Ledger) -> None:
    """Their records say `error` and hold the tokens that reached the front door."""
    threads, errors = open_streams(server, 3)
    kill_stubs(server, "tensorrt_llm")
    for thread in threads:
        thread.join(30)
    records = wait_for_records(ledger, 3)

    assert len(errors) == 3
    assert {record.finish_reason for record in records.values()} == {"error"}
    assert all(record.usage.num_output_tokens > 0 for record in records.values())


@pytest.mark.parametrize("victim", ["front door", "server"])
def test_what_a_killed_process_left_open_is_settled_by_the_next(
    smollm2_build: Path, home: Path, ledger: Ledger, victim: str
) -> None:
    """From the last durable counts, marked as recovered; nothing stays reserved."""
    with running_server(smollm2_build, home, WATTS) as server:
        threads, errors = open_streams(server, 3)
        time.sleep(1.0)  # longer than counts take to become durable
        if victim == "server":
            kill_server(server)
        else:
            kill_stubs(server, "tensorrt_llm_bls")
        if victim == "front door":
            with tritonclient.grpc.InferenceServerClient(server.grpc_url) as admin:
                admin.unload_model("tensorrt_llm_bls")
                deadline_s = time.monotonic() + 60
                while admin.is_model_ready("tensorrt_llm_bls"):
                    assert time.monotonic() < deadline_s
                    time.sleep(0.1)
                admin.load_model("tensorrt_llm_bls")
            records = wait_for_records(ledger, 3)
    for thread in threads:
        thread.join(60)
    if victim == "server":
        with running_server(smollm2_build, home, WATTS):
            records = wait_for_records(ledger, 3)

    assert len(errors) == 3
    assert all(record.is_recovered and record.finish_reason == "error" for record in records.values())
    assert all(record.usage.num_output_tokens > 0 for record in records.values())
    assert ledger.recover() == []
