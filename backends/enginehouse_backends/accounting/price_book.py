"""The price book: what a million tokens of each class, an hour of the machine and a kilowatt hour cost.

A YAML file, content-addressed: its id is the digest of what it says, so a record that carries the id can be priced
again for ever. Prices are decimal strings; a float is refused, since 0.1 is not a float.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal

import yaml

from enginehouse_contract.errors import ConfigurationError
from enginehouse_contract.money import Pico, parse_price, price_of_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from enginehouse_contract.usage import TokenUsage

UnknownModelPolicy = Literal["refuse", "null"]

_CURRENCY: Final = re.compile(r"[A-Z]{3}")
_TOP_KEYS: Final = frozenset(
    {"currency", "effective_from", "unknown_model", "prices", "machine_per_hour", "energy_per_kwh"}
)
_PRICE_KEYS: Final = frozenset({"model", "build", "input", "cached_input", "output"})


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Prices per million tokens, in the book's currency."""

    input: Decimal
    cached_input: Decimal
    output: Decimal

    def lines(self, usage: TokenUsage) -> dict[str, Pico]:
        """Price each billed class; each line is rounded once, their sum not again."""
        return {
            "input": price_of_tokens(usage.num_input_uncached_tokens, self.input),
            "cached_input": price_of_tokens(usage.num_input_cached_tokens, self.cached_input),
            "output": price_of_tokens(usage.num_output_tokens, self.output),
        }

    def amount(self, usage: TokenUsage) -> Pico:
        """Return the sum of the lines."""
        return Pico(sum(self.lines(usage).values()))


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Prices in force from ``effective_from`` until the next book's."""

    currency: str
    effective_from: datetime  # aware, UTC
    unknown_model: UnknownModelPolicy
    by_model: Mapping[str, TokenPrices]
    by_build: Mapping[str, TokenPrices]
    machine_per_hour: Decimal | None
    energy_per_kwh: Decimal | None

    @property
    def book_id(self) -> str:
        """The digest of what the book says, independent of its spelling."""
        return "sha256:" + hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def prices_for(self, model: str, build_id: str) -> TokenPrices | None:
        """Return the prices of a build, else of its model, else None: unknown, which is not free."""
        return self.by_build.get(build_id) or self.by_model.get(model)

    def canonical_json(self) -> str:
        """Return the book as JSON with sorted keys and normalized decimals."""

        def table(prices: Mapping[str, TokenPrices]) -> dict[str, dict[str, str]]:
            return {
                name: {"input": _text(p.input), "cached_input": _text(p.cached_input), "output": _text(p.output)}
                for name, p in prices.items()
            }

        return json.dumps(
            {
                "currency": self.currency,
                "effective_from": self.effective_from.isoformat(),
                "unknown_model": self.unknown_model,
                "by_model": table(self.by_model),
                "by_build": table(self.by_build),
                "machine_per_hour": None if self.machine_per_hour is None else _text(self.machine_per_hour),
                "energy_per_kwh": None if self.energy_per_kwh is None else _text(self.energy_per_kwh),
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_canonical_json(cls, text: str) -> PriceBook:
        """Read :meth:`canonical_json` back."""
        raw = json.loads(text)

        def table(prices: dict[str, dict[str, str]]) -> dict[str, TokenPrices]:
            return {
                name: TokenPrices(Decimal(p["input"]), Decimal(p["cached_input"]), Decimal(p["output"]))
                for name, p in prices.items()
            }

        return cls(
            currency=raw["currency"],
            effective_from=datetime.fromisoformat(raw["effective_from"]),
            unknown_model=raw["unknown_model"],
            by_model=table(raw["by_model"]),
            by_build=table(raw["by_build"]),
            machine_per_hour=None if raw["machine_per_hour"] is None else Decimal(raw["machine_per_hour"]),
            energy_per_kwh=None if raw["energy_per_kwh"] is None else Decimal(raw["energy_per_kwh"]),
        )


def _text(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_price_book(text: str, where: str = "price book") -> PriceBook:
    """Parse a YAML price book; raise :class:`ConfigurationError` naming the line and the field that is wrong."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where} is not YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError(f"{where}: must be a mapping with `currency`, `effective_from` and `prices`.")
    fields = _fields(root, _TOP_KEYS, where)
    for name in ("currency", "effective_from", "prices"):
        if name not in fields:
            raise ConfigurationError(f"{where}, line {_line(root)}: `{name}` is required.")
    policy = _scalar(fields["unknown_model"], "unknown_model", where) if "unknown_model" in fields else "refuse"
    if policy not in {"refuse", "null"}:
        raise _wrong(fields["unknown_model"], "unknown_model", f"must be refuse or null; given {policy}", where)
    by_model, by_build = _prices(fields["prices"], where)
    return PriceBook(
        currency=_currency(fields["currency"], where),
        effective_from=_effective_from(fields["effective_from"], where),
        unknown_model="refuse" if policy == "refuse" else "null",
        by_model=by_model,
        by_build=by_build,
        machine_per_hour=_optional_price(fields, "machine_per_hour", where),
        energy_per_kwh=_optional_price(fields, "energy_per_kwh", where),
    )


def _prices(node: yaml.Node, where: str) -> tuple[dict[str, TokenPrices], dict[str, TokenPrices]]:
    if not isinstance(node, yaml.SequenceNode):
        raise _wrong(node, "prices", "must be a list", where)
    by_model: dict[str, TokenPrices] = {}
    by_build: dict[str, TokenPrices] = {}
    for entry in node.value:
        fields = _fields(entry, _PRICE_KEYS, where)
        if ("model" in fields) == ("build" in fields):
            raise _wrong(entry, "prices", "needs exactly one of `model` and `build` in each entry", where)
        kind, table = ("model", by_model) if "model" in fields else ("build", by_build)
        name = _scalar(fields[kind], kind, where)
        if name in table:
            raise _wrong(fields[kind], kind, f"is priced twice: {name}", where)
        for required in ("input", "output"):
            if required not in fields:
                raise _wrong(entry, required, f"is required for {name}", where)
        price_input = _price(fields["input"], "input", where)
        table[name] = TokenPrices(
            input=price_input,
            cached_input=_price(fields["cached_input"], "cached_input", where)
            if "cached_input" in fields
            else price_input,
            output=_price(fields["output"], "output", where),
        )
    return by_model, by_build


def _fields(node: yaml.Node, known: frozenset[str], where: str) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(f"{where}, line {_line(node)}: must be a mapping.")
    fields: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.value not in known:
            raise _wrong(key, str(key.value), f"is unknown; known: {', '.join(sorted(known))}", where)
        if key.value in fields:
            raise _wrong(key, key.value, "is given twice", where)
        fields[key.value] = value
    return fields


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _wrong(node: yaml.Node, field: str, problem: str, where: str) -> ConfigurationError:
    return ConfigurationError(f"{where}, line {_line(node)}: `{field}` {problem}.")


def _scalar(node: yaml.Node, field: str, where: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.value:
        raise _wrong(node, field, "must be a text", where)
    return str(node.value)


def _price(node: yaml.Node, field: str, where: str) -> Decimal:
    if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:str":
        raise _wrong(node, field, f'must be a quoted decimal, such as "0.15"; given {node.value}', where)
    try:
        return parse_price(_scalar(node, field, where), field)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}, line {_line(node)}: {error}") from error


def _optional_price(fields: Mapping[str, yaml.Node], field: str, where: str) -> Decimal | None:
    return _price(fields[field], field, where) if field in fields else None


def _currency(node: yaml.Node, where: str) -> str:
    currency = _scalar(node, "currency", where)
    if not _CURRENCY.fullmatch(currency):
        raise _wrong(node, "currency", f"must be an ISO 4217 code, such as USD; given {currency}", where)
    return currency


def _effective_from(node: yaml.Node, where: str) -> datetime:
    text = _scalar(node, "effective_from", where)
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise _wrong(node, "effective_from", f"must be an ISO 8601 time; given {text}", where) from None
    if moment.tzinfo is None:
        raise _wrong(
            node, "effective_from", f"must state its time zone, such as 2026-01-01T00:00:00Z; given {text}", where
        )
    return moment.astimezone(timezone.utc)


def import_litellm(text: str, currency: str, effective_from: str) -> str:
    """Turn LiteLLM's price map (JSON, costs per token) into our YAML; models without token prices are left out.

    Raises :class:`ConfigurationError` when it is not such a map.
    """
    to_decimal: Callable[[str], Decimal] = Decimal
    try:
        raw: Any = json.loads(text, parse_float=to_decimal)
    except ValueError as error:
        raise ConfigurationError(f"the price map is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigurationError("the price map must be a JSON object of models.")
    prices = []
    for model, entry in sorted(raw.items()):
        if not isinstance(entry, dict) or model == "sample_spec":
            continue
        costs = {
            ours: entry.get(theirs)
            for ours, theirs in (
                ("input", "input_cost_per_token"),
                ("cached_input", "cache_read_input_token_cost"),
                ("output", "output_cost_per_token"),
            )
        }
        if costs["input"] is None or costs["output"] is None:
            continue
        known = {name: _text(Decimal(cost) * 10**6) for name, cost in costs.items() if cost is not None}
        prices.append({"model": model, **known})
    book = {"currency": currency, "effective_from": effective_from, "prices": prices}
    rendered = yaml.safe_dump(book, sort_keys=False)
    parse_price_book(rendered, "the imported price map")
    return rendered
