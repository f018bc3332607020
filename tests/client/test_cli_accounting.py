"""`enginehouse usage|cost|budget|prices` over a ledger of three requests."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from enginehouse_backends.accounting.ledger import Ledger, MachineTime
from enginehouse_backends.accounting.records import ComputeShare, Reservation, Settlement
from enginehouse_backends.accounting.windows import NS_PER_S
from enginehouse_cli.main import run
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Cli = Callable[..., str]

NOON_NS = 1_749_376_800 * NS_PER_S  # 2025-06-08T10:00:00Z
BOOK = """\
currency: EUR
effective_from: 2020-01-01T00:00:00Z
machine_per_hour: "0.36"
prices:
  - model: small
    input: "1"
    output: "4"
"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs a command which must succeed, and returns what it prints."""
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")

    def call(*arguments: str, expected_code: int = 0) -> str:
        code = run(list(arguments))
        printed = capsys.readouterr()
        assert code == expected_code, printed.err
        return printed.out if expected_code == 0 else printed.err

    return call


@pytest.fixture
def filled(cli: Cli, tmp_path: Path) -> Cli:
    """Add prices, and run three requests of two tenants on an hour of one machine."""
    book = tmp_path / "book.yaml"
    book.write_text(BOOK)
    cli("prices", "add", str(book))
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=lambda: NOON_NS) as ledger:
        for number, tenant in enumerate(("acme", "acme", "beta")):
            key = ledger.reserve(Reservation(tenant, f"r{number}", "small", "sha256:b", TokenUsage(9, 0, 9))).key
            share = ComputeShare(1_500_000, 600 * NS_PER_S, is_estimated=True)
            ledger.settle(Settlement(key, TokenUsage(600, 400, 250), "stop", share=share))
        ledger.record_machine_time(MachineTime("m1", 3600 * NS_PER_S))
    return cli


def parse_csv(text: str) -> list[dict[str, str]]:
    """Read CSV."""
    return list(csv.DictReader(io.StringIO(text)))


def test_usage_is_shown_as_table_json_and_csv(filled: Cli) -> None:
    """The same rows, whatever the form."""
    rows: list[dict[str, Any]] = json.loads(filled("usage", "--by", "tenant", "--json"))

    assert [(row["tenant"], row["requests"], row["amount"], row["currency"]) for row in rows] == [
        ("acme", 2, "0.004", "EUR"),
        ("beta", 1, "0.002", "EUR"),
    ]
    assert (rows[0]["input_tokens"], rows[0]["cached_tokens"], rows[0]["energy_joules"]) == (2000, 800, "3.000")
    as_text = [{name: str(value) for name, value in row.items()} for row in rows]
    assert parse_csv(filled("usage", "--by", "tenant", "--csv")) == as_text
    assert "acme" in filled("usage", "--by", "tenant,build,day")


def test_days_choose_and_nothing_is_said_so(filled: Cli) -> None:
    """A period without usage is no error."""
    assert "no usage yet" in filled("usage", "--since", "2025-06-09")
    assert json.loads(filled("usage", "--until", "2025-06-07", "--json")) == []
    (row,) = json.loads(filled("usage", "--by", "day", "--since", "2025-06-08", "--until", "2025-06-08", "--json"))
    assert (row["day"], row["requests"]) == ("2025-06-08", 3)


def test_single_requests_are_listed(filled: Cli) -> None:
    """Newest first, of one tenant where asked."""
    rows = json.loads(filled("usage", "--records", "10", "--tenant", "acme", "--json"))

    assert [row["request_id"] for row in rows] == ["r1", "r0"]
    assert rows[0]["settled_at"] == "2025-06-08T10:00:00+00:00"
    assert (rows[0]["amount"], rows[0]["is_estimated"], rows[0]["is_recovered"]) == ("0.002", True, False)


def test_costs_add_up_to_the_machines_bill(filled: Cli) -> None:
    """Half an hour busy, half an hour idle."""
    report = json.loads(filled("cost", "--json"))

    assert [(line["tenant"], line["billed"], line["allocated"]) for line in report["lines"]] == [
        ("acme", "0.004", "0.12"),
        ("beta", "0.002", "0.06"),
    ]
    assert report["totals"] == {
        "billed": "0.006",
        "currency": "EUR",
        "idle": "0.18",
        "idle_hours": "0.500",
        "machine_bill": "0.36",
        "machine_hours": "1.000",
        "margin": "-0.354",
    }
    assert "machine bill: 0.36" in filled("cost", "--by", "model,day")


def test_the_cost_of_a_build_is_one_query(filled: Cli) -> None:
    """Per million output tokens, on both bases; unknown for a build that never ran."""
    row = json.loads(filled("cost", "--build", "sha256:b", "--json"))

    assert (row["billed_per_million_output_tokens"], row["machine_cost_per_million_output_tokens"]) == ("8", "240")
    assert json.loads(filled("cost", "--build", "never", "--json"))["billed_per_million_output_tokens"] is None


def test_the_focus_export_is_csv(filled: Cli) -> None:
    """A row for each day, tenant, build and token class that was used."""
    rows = parse_csv(filled("cost", "--focus", "--billing-account", "house"))

    assert len(rows) == 6
    assert {row["BillingAccountId"] for row in rows} == {"house"}
    assert {row["SkuMeter"] for row in rows} == {"input tokens", "cached input tokens", "output tokens"}


def test_budgets_are_set_listed_and_removed(cli: Cli) -> None:
    """What was set is what is listed."""
    assert "no budgets" in cli("budget", "list")
    cli("budget", "set", "acme", "day", "--hard-spend", "12.50", "--soft-requests", "100", "--time-zone", "Asia/Tokyo")
    cli("budget", "set", "acme", "minute", "--key", "web", "--hard-tokens", "5000")
    rows = json.loads(cli("budget", "list", "--json"))

    assert [(row["key"], row["window"], row["hard_spend"], row["hard_tokens"]) for row in rows] == [
        ("", "day", "12.5", None),
        ("web", "minute", None, 5000),
    ]
    assert rows[0]["time_zone"] == "Asia/Tokyo"
    assert "none" in cli("budget", "list")
    assert cli("budget", "remove", "acme", "day") == "removed\n"
    assert "is not set" in cli("budget", "remove", "acme", "day", expected_code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("budget", "set", "acme", "year"), "`window` must be one of minute, hour, day, week, month; given year"),
        (("budget", "set", "acme", "day", "--hard-spend", "-1"), "`hard_spend` is out of range"),
        (("budget", "set", "acme", "day", "--hard-spend", "ten"), "`--hard-spend` must be a decimal string"),
        (("budget", "set", "a\nb", "day"), "`tenant` holds control characters"),
        (("usage", "--by", "colour"), "`--by` knows tenant, model, build and day; given colour"),
        (("cost", "--since", "yesterday"), "`--since` must be a day, such as 2026-01-31; given yesterday"),
        (("usage", "--ledger", "ledger.db"), "the ledger's URL `ledger.db` cannot be read"),
        (("prices", "add", "missing.yaml"), "missing.yaml cannot be read: No such file or directory"),
    ],
)
def test_mistakes_are_told_in_one_line(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    """With the option that is wrong."""
    printed = cli(*arguments, expected_code=1)

    assert message in printed
    assert printed.count("\n") == 1


def test_price_books_are_imported_added_and_shown(cli: Cli, tmp_path: Path) -> None:
    """From LiteLLM's map to prices in force; another book for the same date is refused."""
    source, book = tmp_path / "map.json", tmp_path / "book.yaml"
    source.write_text('{"gpt-x": {"input_cost_per_token": 1.5e-07, "output_cost_per_token": 6e-07}}')
    assert "no price books" in cli("prices", "list")
    cli("prices", "import", str(source), "--effective-from", "2020-01-01T00:00:00Z", "--output", str(book))
    assert "effective_from" in cli("prices", "import", str(source), "--effective-from", "2020-01-01T00:00:00Z")
    assert "added sha256:" in cli("prices", "add", str(book))

    assert json.loads(cli("prices", "show", "--json")) == [
        {"for": "model", "name": "gpt-x", "input": "0.15", "cached_input": "0.15", "output": "0.6", "currency": "USD"}
    ]
    assert len(json.loads(cli("prices", "list", "--json"))) == 1
    book.write_text(book.read_text().replace("0.6", "0.7"))
    assert "is the date of another price book already" in cli("prices", "add", str(book), expected_code=1)
