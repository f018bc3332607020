"""The cost gate: what a million output tokens cost on this machine, from the seconds that the speed gate measured."""

from __future__ import annotations

from decimal import Decimal
from statistics import median
from typing import TYPE_CHECKING, Final

from enginehouse_builders.gates.record import GateResult
from enginehouse_contract.money import Pico, format_amount, price_of_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginehouse_builders.gates.record import Value
    from enginehouse_builders.gates.speed import Round, SpeedRun
    from enginehouse_builders.spec.model import CostGate

_MILLION: Final = 10**6
_NS_PER_S: Final = 10**9


def cost_gate(run: SpeedRun, limits: CostGate, machine_hour: Decimal | None, currency: str) -> GateResult:
    """Judge the cost per million output tokens: machine seconds of the trace times *machine_hour* (of the whole host).

    Seconds are compared with the reference's also where nobody said what they cost; the money is then unknown (null).
    """
    ns_per_million = _ns_per_million(run.build)
    amount = _amount(ns_per_million, machine_hour)
    numbers: dict[str, Value] = {
        "machine_s_per_million_output_tokens": ns_per_million / _NS_PER_S,
        "cost_per_million_output_tokens": None if amount is None else format_amount(amount),
        "machine_hour": None if machine_hour is None else str(machine_hour),
        "currency": currency,
    }
    thresholds = limits.model_dump(mode="json")
    failures = []
    limit = limits.max_per_million_output_tokens
    if limit is not None and amount is None:
        return GateResult(
            "cost",
            "failed",
            "a limit is set, and what the machine costs is not known: set `costs.machine_hour` in the spec",
            numbers,
            thresholds,
        )
    if limit is not None and amount is not None and Decimal(format_amount(amount)) > limit:
        failures.append(f"a million output tokens cost {_short(amount)} {currency}, at most {limit} may be")
    if run.reference:
        numbers["reference_cost_per_million_output_tokens"] = (
            None if (theirs := _amount(_ns_per_million(run.reference), machine_hour)) is None else format_amount(theirs)
        )
        # the same pairs of rounds as speed: the machine costs the same in both
        ratio = median(b.tokens_per_s / a.tokens_per_s for a, b in zip(run.build, run.reference, strict=True))
        numbers["cost_ratio"] = ratio
        if ratio > limits.max_ratio:
            failures.append(f"tokens cost {ratio:.2f} of the reference's, at most {limits.max_ratio:g} may be")
    elif limit is None:
        return GateResult("cost", "skipped", "no reference, and no limit is set in money", numbers, thresholds)
    known = f"{_short(amount)} {currency} per million output tokens" if amount is not None else "in machine seconds"
    reason = "; ".join(failures) or f"costs what it may: {known}"
    return GateResult("cost", "failed" if failures else "passed", reason, numbers, thresholds)


def _ns_per_million(rounds: Sequence[Round]) -> int:
    num_tokens = sum(one.num_output_tokens for one in rounds)
    return round(sum(one.elapsed_s for one in rounds) / num_tokens * _MILLION * _NS_PER_S)


def _amount(duration_ns: int, machine_hour: Decimal | None) -> Pico | None:
    return None if machine_hour is None else price_of_seconds(duration_ns, machine_hour)


def _short(amount: Pico) -> str:
    """An amount for reading: four digits that count."""
    return f"{Decimal(format_amount(amount)):.4g}"
