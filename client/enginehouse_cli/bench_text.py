"""The figures of a run, and of a comparison, as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from enginehouse_builders.bench.compare import ratio_text
from enginehouse_builders.bench.figures import cost_text

if TYPE_CHECKING:
    from enginehouse_builders.bench.compare import ComparedMetric, Comparison
    from enginehouse_builders.bench.figures import Figures
    from enginehouse_builders.bench.statistics import Summary

_NONE: Final = "-"
_MS_PER_S: Final = 1000


def figures_text(figures: Figures) -> str:
    """Return a run's figures: latencies in milliseconds with their counts, rates, money, energy, warnings."""
    rows: list[tuple[str, ...]] = [("", "count", "mean", "p50", "p90", "p99", "max")]
    names = {
        "time to first token": figures.ttft_s,
        "inter-token latency": figures.itl_s,
        "time per output token": figures.tpot_s,
        "end to end": figures.e2e_s,
    }
    rows += [(f"{name}, ms", *_summary_row(summary)) for name, summary in names.items() if summary.count]
    width = max(len(row[0]) for row in rows)
    lines = ["  ".join((row[0].ljust(width), *(cell.rjust(8) for cell in row[1:]))) for row in rows]
    lines += ["", *(f"{name.ljust(width)}  {value}" for name, value in _facts(figures))]
    lines += [f"warning: {warning}" for warning in figures.warnings]
    return "\n".join(lines)


def _summary_row(summary: Summary) -> tuple[str, ...]:
    values = (summary.mean, summary.p50, summary.p90, summary.p99, summary.max)
    return str(summary.count), *(_NONE if value is None else f"{value * _MS_PER_S:.1f}" for value in values)


def _facts(figures: Figures) -> list[tuple[str, str]]:
    ends = f"{figures.num_complete} complete, {figures.num_failed} failed, {figures.num_cancelled} cancelled"
    facts = [
        ("requests", f"{ends} in {figures.window_s:.1f} s, after {figures.num_warmup} of warm-up"),
        ("requests/s", f"{figures.requests_per_s:.2f}"),
        ("output tokens/s", f"{figures.output_tokens_per_s:.1f}"),
        ("input tokens/s", f"{figures.input_tokens_per_s:.1f}"),
    ]
    if figures.goodput_requests_per_s is not None and figures.slo_share is not None:
        share = f"{figures.slo_share:.0%} of the requests meet the SLO"
        facts.append(("goodput, requests/s", f"{figures.goodput_requests_per_s:.2f}; {share}"))
    means = [figures.input_tokens.mean, figures.output_tokens.mean]
    facts.append(
        ("tokens per request", " in, ".join(_NONE if m is None else f"{m:.1f}" for m in means) + " out (mean)")
    )
    if figures.cached_input_share:
        facts.append(("input from cache", f"{figures.cached_input_share:.0%}"))
    facts += [("billed", f"{cost_text(cost)}, of {cost['num_requests']} requests") for cost in figures.cost_of_usage]
    if figures.cost_of_machine is not None:
        facts.append(("machine time", cost_text(figures.cost_of_machine)))
    if figures.energy is not None:
        joules, per_token = figures.energy["joules"], figures.energy["joules_per_output_token"]
        kind = "estimated" if figures.energy["is_estimated"] else "measured"
        facts.append(("energy", f"{joules:.1f} J {kind}; {per_token:.3f} J per output token"))
    facts += [(f"failed: {kind}", f"{e['count']}, such as: {e['example']}") for kind, e in figures.errors.items()]
    return facts


def comparison_text(comparison: Comparison) -> str:
    """Return a comparison: a line per metric, then what differs between the runs."""
    rows = [("", "A", "B", "B / A [95 %]", "B is")]
    rows += [
        (_name(metric), _value(metric, metric.a), _value(metric, metric.b), ratio_text(metric.ratio), metric.verdict)
        for metric in comparison.metrics
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(
            (row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3].ljust(widths[3]), row[4])
        )
        for row in rows
    ]
    lines += [f"differs: {name}: {a} and {b}" for name, (a, b) in comparison.differing_parameters.items()]
    lines += [f"warning: {warning}" for warning in comparison.warnings]
    return "\n".join(line.rstrip() for line in lines)


def _name(metric: ComparedMetric) -> str:
    unit = {"s": ", ms", "1/s": "", "J": "", "": ""}[metric.unit]
    return f"{metric.name.replace('_', ' ').replace(' per s', '/s')}{unit}"


def _value(metric: ComparedMetric, value: float) -> str:
    return f"{value * _MS_PER_S:.1f}" if metric.unit == "s" else f"{value:.4g}"
