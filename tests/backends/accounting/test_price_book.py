"""Price books: exact prices, content addresses, and errors that name line and field."""

from __future__ import annotations

from decimal import Decimal

import pytest

from enginehouse_backends.accounting.price_book import PriceBook, import_litellm, parse_price_book
from enginehouse_contract.errors import ConfigurationError
from enginehouse_contract.usage import TokenUsage

BOOK = """\
currency: USD
effective_from: 2026-01-01T00:00:00Z
machine_per_hour: "0.40"
energy_per_kwh: "0.30"
prices:
  - model: small
    input: "0.05"
    cached_input: "0.0125"
    output: "0.20"
  - build: sha256:abc
    input: "1"
    output: "2"
"""


def test_each_class_is_priced_once_and_exactly() -> None:
    """A line is tokens times the class's price; cached input without a price costs what input costs."""
    book = parse_price_book(BOOK)
    small, build = book.prices_for("small", "sha256:other"), book.prices_for("small", "sha256:abc")
    usage = TokenUsage(1000, 400, 30, num_draft_rejected_tokens=7, num_recomputed_tokens=9)

    assert small is not None
    assert small.lines(usage) == {"input": 50_000_000, "cached_input": 5_000_000, "output": 6_000_000}
    assert build is not None
    assert build.cached_input == build.input == Decimal(1)
    assert book.prices_for("unknown", "sha256:none") is None


def test_the_id_depends_on_what_is_said_and_not_on_its_spelling() -> None:
    """Comments, order, trailing zeros and time zones change nothing; a price does."""
    book = parse_price_book(BOOK)
    respelled = BOOK.replace('"0.40"', '"0.4"').replace("00:00:00Z", "01:00:00+01:00") + "# a comment\n"

    assert parse_price_book(respelled).book_id == book.book_id
    assert parse_price_book(BOOK.replace('"0.20"', '"0.21"')).book_id != book.book_id
    assert PriceBook.from_canonical_json(book.canonical_json()).book_id == book.book_id


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('input: "0.05"', "input: 0.05", "line 7: `input` must be a quoted decimal"),
        ('input: "0.05"', 'input: "-1"', "line 7: `input` must be a decimal string of at least 0"),
        ('input: "0.05"', 'input: "1e-3"', "line 7"),
        ('input: "0.05"', 'inptu: "0.05"', "line 7: `inptu` is unknown; known: build"),
        ("model: small", "model: small\n    build: x", "line 6: `prices` needs exactly one of"),
        ("currency: USD", "currency: dollars", "line 1: `currency` must be an ISO 4217 code"),
        ("T00:00:00Z", "T00:00:00", "line 2: `effective_from` must state its time zone"),
        ("2026-01-01T00:00:00Z", "soon", "line 2: `effective_from` must be an ISO 8601 time"),
        ("currency: USD\n", "", "line 1: `currency` is required"),
        ("build: sha256:abc", "model: small", "line 10: `model` is priced twice: small"),
        ('    output: "2"\n', "", "line 10: `output` is required for sha256:abc"),
        ("currency: USD", "currency: [USD", "is not YAML"),
    ],
)
def test_a_wrong_book_names_line_and_field(old: str, new: str, message: str) -> None:
    """Each mistake is reported where it stands."""
    with pytest.raises(ConfigurationError) as caught:
        parse_price_book(BOOK.replace(old, new))

    assert message in str(caught.value)


def test_litellm_prices_are_imported_without_floats() -> None:
    """Costs per token become exact prices per million; entries without token prices are left out."""
    source = """{"sample_spec": {}, "gpt-x": {"input_cost_per_token": 1.5e-07, "output_cost_per_token": 6e-07,
        "cache_read_input_token_cost": 7.5e-08}, "image-model": {"cost_per_image": 0.04}}"""
    prices = parse_price_book(import_litellm(source, "USD", "2026-01-01T00:00:00Z")).prices_for("gpt-x", "")

    assert prices is not None
    assert (prices.input, prices.cached_input, prices.output) == (Decimal("0.15"), Decimal("0.075"), Decimal("0.6"))
    with pytest.raises(ConfigurationError, match="not JSON"):
        import_litellm("{", "USD", "2026-01-01T00:00:00Z")
