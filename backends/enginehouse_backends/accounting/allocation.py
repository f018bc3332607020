"""The second basis of cost: what the machine costs, split over those who kept it busy, with idle as its own line.

The usage basis (tokens x price) says what is billed; the allocation basis (machine time x rate) what it costs to serve.
Both stand side by side in a :class:`CostReport`, whose allocated lines and idle add up to the machine's bill exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final, TypeVar

from enginehouse_backends.accounting.shares import split_by_weight
from enginehouse_contract.money import Pico

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

GroupT = TypeVar("GroupT", bound="Hashable")

_PER_MILLION: Final = 10**6


def allocate(bill: Pico, uptime_ns: int, busy_ns: Mapping[GroupT, int]) -> tuple[dict[GroupT, Pico], Pico]:
    """Split a machine's bill over groups by busy time; return their parts and the idle part.

    The parts and idle add up to the bill. Where more time was busy than the machine is known to have been up (a request
    that ends after midnight counts there as a whole), nothing is idle.

    >>> allocate(Pico(100), 10, {"a": 3, "b": 2})
    ({'a': 30, 'b': 20}, 50)
    """
    idle_ns = max(0, uptime_ns - sum(busy_ns.values()))
    weights = [*busy_ns.values(), idle_ns]
    if not any(weights):
        return dict.fromkeys(busy_ns, Pico(0)), bill
    *parts, idle = split_by_weight(bill, weights)
    return {group: Pico(part) for group, part in zip(busy_ns, parts, strict=True)}, Pico(idle)


@dataclass(frozen=True, slots=True)
class CostLine:
    """One group's cost on both bases, in pico-units."""

    group: tuple[str, ...]  # values of the report's dimensions
    num_requests: int
    num_output_tokens: int
    machine_ns: int
    billed: Pico  # tokens x price, of the requests that have a price
    num_unpriced: int
    allocated: Pico | None  # machine time x rate; None: no machine time or no rate is known


@dataclass(frozen=True, slots=True)
class CostReport:
    """Costs of a period on both bases."""

    dimensions: tuple[str, ...]
    currency: str | None
    lines: tuple[CostLine, ...]
    uptime_ns: int
    idle_ns: int
    idle: Pico | None
    machine_bill: Pico | None

    @property
    def billed(self) -> Pico:
        """Everything billed."""
        return Pico(sum(line.billed for line in self.lines))

    @property
    def margin(self) -> Pico | None:
        """What was billed beyond what the machines cost, idle included."""
        return None if self.machine_bill is None else Pico(self.billed - self.machine_bill)


@dataclass(frozen=True, slots=True)
class BuildCost:
    """What a build's output cost, from real runs: what promotion's cost gate compares."""

    build_id: str
    num_requests: int
    num_output_tokens: int
    machine_ns: int
    energy_uj: int
    billed: Pico
    machine_amount: Pico | None  # machine time x rate, without idle

    @property
    def billed_per_million(self) -> Pico | None:
        """Billed amount per million output tokens; None before the first token."""
        return _per_million(self.billed, self.num_output_tokens)

    @property
    def machine_per_million(self) -> Pico | None:
        """Machine cost per million output tokens; None before the first token or without a rate."""
        return None if self.machine_amount is None else _per_million(self.machine_amount, self.num_output_tokens)

    @property
    def energy_uj_per_token(self) -> int | None:
        """Energy per output token."""
        return self.energy_uj // self.num_output_tokens if self.num_output_tokens else None


def _per_million(amount: Pico, num_tokens: int) -> Pico | None:
    if not num_tokens:
        return None
    return Pico(round(Fraction(amount * _PER_MILLION, num_tokens)))  # half-even
