"""The figures of a run: latency, throughput, goodput, errors, cost and energy, and what to distrust about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.bench.statistics import Summary, percentile, summarize
from enginehouse_contract.money import PICO_PER_UNIT, format_amount, parse_price, price_of_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginehouse_builders.bench.records import RequestRecord
    from enginehouse_builders.bench.run import BenchRun

MAX_LOOP_SHARE: Final = 0.8
MAX_CORE_SHARE: Final = 0.1  # of the machine's cores, where the server needs them too
MAX_SEND_LAG_S: Final = 0.01
MAX_SEND_LAG_SHARE: Final = 0.05  # of the median time to first token, which includes the lag
MAX_UNEXPECTED_CACHED_SHARE: Final = 0.1
_MIN_KEPT_RATE: Final = 0.9
_FEW_REQUESTS: Final = 30
_PER_MILLION: Final = 10**6
_NS_PER_S: Final = 10**9


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the measured requests; rates are over the window. See ``docs/benchmarking.md`` for each."""

    num_requests: int
    num_complete: int
    num_failed: int
    num_cancelled: int
    num_warmup: int
    window_s: float
    ttft_s: Summary
    itl_s: Summary
    tpot_s: Summary
    e2e_s: Summary
    send_lag_s: Summary
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    goodput_requests_per_s: float | None  # None: no SLO was given
    slo_share: float | None
    input_tokens: Summary
    output_tokens: Summary
    cached_input_share: float | None
    errors: dict[str, dict[str, Any]]  # kind -> count, example
    finish_reasons: dict[str, int]
    build_ids: dict[str, int]
    cost_of_usage: list[dict[str, Any]]  # as the server bills; one entry a currency
    cost_of_machine: dict[str, Any] | None  # window x price of a machine hour
    energy: dict[str, Any] | None
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def compute_figures(run: BenchRun) -> Figures:
    """Compute a run's figures."""
    measured = run.measured
    start_s, end_s = run.window_s
    window_s = end_s - start_s
    ended = [r for r in run.counted if r.is_complete and start_s <= r.ended_at_s <= end_s]
    judged = [r for r in measured if not r.is_cancelled]
    num_output = tokens_in_window(run.counted, start_s, end_s)
    num_input = sum(r.num_input_tokens or 0 for r in ended)

    def rate(count: float) -> float:
        return count / window_s if window_s > 0 else 0.0

    return Figures(
        num_requests=len(measured),
        num_complete=sum(r.is_complete for r in measured),
        num_failed=sum(r.error_kind is not None for r in measured),
        num_cancelled=sum(r.is_cancelled for r in measured),
        num_warmup=len(run.records) - len(measured),
        window_s=window_s,
        ttft_s=summarize([v for r in measured if (v := r.ttft_s) is not None and r.error_kind is None]),
        itl_s=summarize([gap for r in measured if r.error_kind is None for gap in r.itl_s]),
        tpot_s=summarize([v for r in measured if (v := r.tpot_s) is not None]),
        e2e_s=summarize([v for r in measured if (v := r.e2e_s) is not None]),
        send_lag_s=summarize([r.sent_at_s - r.intended_at_s for r in measured] if run.loop == "open" else []),
        requests_per_s=rate(len(ended)),
        output_tokens_per_s=rate(num_output),
        input_tokens_per_s=rate(num_input),
        goodput_requests_per_s=rate(sum(map(run.slo.is_met_by, ended))) if run.slo.limits_s else None,
        slo_share=sum(map(run.slo.is_met_by, judged)) / len(judged) if run.slo.limits_s and judged else None,
        input_tokens=summarize([r.num_input_tokens for r in measured if r.num_input_tokens is not None]),
        output_tokens=summarize([r.num_tokens_seen for r in measured if r.is_complete]),
        cached_input_share=cached_input_share(measured),
        errors=_errors(measured),
        finish_reasons=dict(Counter(r.finish_reason for r in measured if r.finish_reason is not None)),
        build_ids=dict(Counter(r.build_id for r in measured if r.build_id is not None)),
        cost_of_usage=_cost_of_usage(measured),
        cost_of_machine=_cost_of_machine(run, window_s, num_output),
        energy=_energy(measured),
        warnings=_warnings(run),
    )


def tokens_in_window(records: Sequence[RequestRecord], start_s: float, end_s: float) -> float:
    """Return the output tokens that came between two times; a request's tokens are spread over its pieces."""
    total = 0.0
    for record in records:
        if record.piece_at_s:
            share = sum(start_s <= at_s <= end_s for at_s in record.piece_at_s) / len(record.piece_at_s)
            total += record.num_tokens_seen * share
    return total


def cached_input_share(measured: Sequence[RequestRecord]) -> float | None:
    """Return the part of the input tokens that the server had in its prefix cache; None where it does not tell."""
    known = [r for r in measured if r.num_input_tokens and r.num_cached_input_tokens is not None]
    if not known:
        return None
    return sum(r.num_cached_input_tokens or 0 for r in known) / sum(r.num_input_tokens or 0 for r in known)


def _errors(measured: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    errors: dict[str, dict[str, Any]] = {}
    for record in measured:
        if record.error_kind is not None:
            errors.setdefault(record.error_kind, {"count": 0, "example": record.error})["count"] += 1
    return errors


def _cost_of_usage(measured: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    billed = [r for r in measured if r.cost is not None and r.currency is not None]
    entries = []
    for currency in sorted({r.currency for r in billed if r.currency is not None}):
        mine = [r for r in billed if r.currency == currency]
        pico = int(sum((r.cost or Decimal(0) for r in mine), Decimal(0)) * PICO_PER_UNIT)
        tokens = sum(r.num_tokens_seen for r in mine)
        entries.append({"currency": currency, "num_requests": len(mine), **_amounts(pico, tokens)})
    return entries


def _cost_of_machine(run: BenchRun, window_s: float, num_output: float) -> dict[str, Any] | None:
    if run.machine_hour is None:
        return None
    pico = price_of_seconds(round(window_s * _NS_PER_S), parse_price(run.machine_hour, "machine_hour"))
    return {"currency": run.currency, "machine_hour": run.machine_hour, **_amounts(pico, round(num_output))}


def _amounts(pico: int, num_output_tokens: int) -> dict[str, Any]:
    per_million = format_amount(pico * _PER_MILLION // num_output_tokens) if num_output_tokens else None
    return {
        "amount": format_amount(pico),
        "num_output_tokens": num_output_tokens,
        "per_million_output_tokens": per_million,
    }


def cost_text(cost: dict[str, Any]) -> str:
    """Return an entry of a run's costs for people, rounded to millionths."""
    per_million = cost["per_million_output_tokens"]
    rate = "" if per_million is None else f"; {Decimal(per_million):.6f} per million output tokens"
    return f"{Decimal(cost['amount']):.6f} {cost['currency']}{rate}"


def _energy(measured: Sequence[RequestRecord]) -> dict[str, Any] | None:
    known = [r for r in measured if r.energy_joules is not None]
    if not known:
        return None
    joules, tokens = sum(r.energy_joules or 0.0 for r in known), sum(r.num_tokens_seen for r in known)
    return {
        "joules": joules,
        "joules_per_output_token": joules / tokens if tokens else None,
        "num_requests": len(known),
        "is_estimated": any(r.is_energy_estimated for r in known),
    }


def _warnings(run: BenchRun) -> list[str]:
    """Say what would mislead a reader of the figures."""
    measured, generator = run.measured, run.generator
    warnings = []
    if generator.loop_share > MAX_LOOP_SHARE:
        warnings.append(
            f"the generator is the bottleneck: its event loop took {generator.loop_share:.0%} of a core. "
            "Lower the load, or run several generators."
        )
    cores = run.environment.get("num_cpus") or 1
    if run.environment.get("is_server_local") and generator.num_cores / cores > MAX_CORE_SHARE:
        warnings.append(
            f"the generator took {generator.num_cores / cores:.0%} of this machine's {cores} cores, and the server "
            "runs on it, too: it would be faster without that."
        )
    if run.loop == "open" and measured:
        warnings.extend(_open_loop_warnings(run))
    shares_nothing = not run.parameters.get("trace") and not run.parameters.get("num_shared_prefix_tokens")
    cached = cached_input_share(measured) or 0.0
    if shares_nothing and cached > MAX_UNEXPECTED_CACHED_SHARE:
        warnings.append(
            f"{cached:.0%} of the input came from the server's prefix cache although no prefix is shared: it has seen "
            "these prompts before. Take another --seed, or a server that has just started."
        )
    num_failed = sum(r.error_kind is not None for r in measured)
    if num_failed:
        warnings.append(f"{num_failed} of {len(measured)} requests failed; the latencies are those of the others.")
    if 0 < len(measured) < _FEW_REQUESTS:
        few = f"only {len(measured)} requests were measured"
        warnings.append(f"{few}: medians are rough, high percentiles missing.")
    return warnings


def _open_loop_warnings(run: BenchRun) -> list[str]:
    measured, warnings = run.measured, []
    lags = [r.sent_at_s - r.intended_at_s for r in measured]
    late_s = percentile(lags, 99) or max(lags)
    first_token_s = percentile([r.ttft_s for r in measured if r.ttft_s is not None], 50) or 0.0
    if late_s > max(MAX_SEND_LAG_S, MAX_SEND_LAG_SHARE * first_token_s):
        warnings.append(
            f"requests left up to {late_s * 1000:.0f} ms late, so the generator could not keep its own schedule; "
            "latencies count from the intended times and include it."
        )
    first_s, last_s = measured[0].intended_at_s, measured[-1].intended_at_s
    if last_s > first_s:
        asked = sum(not r.is_cancelled for r in measured)
        ended = sum(r.is_complete and first_s <= r.ended_at_s <= last_s for r in run.records)
        if asked >= _FEW_REQUESTS and ended < _MIN_KEPT_RATE * asked:
            warnings.append(
                f"arrivals outran the server: {asked} requests came and {ended} ended while they came. "
                "Latencies tell how long the run was, not how fast the server is."
            )
    return warnings
