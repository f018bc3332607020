"""A run as one HTML page: tiles, plots and tables, without scripts and without anything from the network."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.bench.figures import cost_text
from enginehouse_builders.bench.plots import draw_plots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from enginehouse_builders.bench.figures import Figures
    from enginehouse_builders.bench.run import BenchRun
    from enginehouse_builders.bench.statistics import Summary

_MS_PER_S: Final = 1000
_NONE: Final = "–"  # noqa: RUF001 - typography
_STYLE: Final = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #fff; --ink: #1d1f23; --soft: #62666e; --rule: #e3e3df;
  --line: #2563b8; --muted: #a9adb5; --bad: #b3261e; --warn: #fff4d6; --limit: #b45309; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1e2125; --ink: #e8e8e6; --soft: #a0a5ad;
  --rule: #33373d; --line: #7db0f5; --muted: #5d636c; --bad: #ff8a80; --warn: #3a3010; --limit: #f0b35a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 0 0 8px; }
.sub { color: var(--soft); margin: 0 0 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-bottom: 12px; }
.plots, .tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 12px;
  align-items: start; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px 16px; min-width: 0; }
.tables { margin-top: 12px; } .wide { margin-top: 12px; overflow-x: auto; }
.tile b { display: block; font-size: 24px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.warnings { background: var(--warn); border-radius: 8px; padding: 10px 16px 10px 34px; margin: 0 0 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-top: 1px solid var(--rule); overflow-wrap: anywhere; }
tr:first-child > * { border-top: 0; } th { font-weight: 500; color: var(--soft); }
.numbers td, .numbers thead th + th { text-align: right; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .limit-name { fill: var(--limit);
  paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); } .limit { stroke: var(--limit); stroke-dasharray: 5 4; }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; }
.dots { fill: var(--line); fill-opacity: .65; } .dots.muted { fill: var(--muted); }
.crosses { stroke: var(--bad); stroke-width: 2; fill: none; } .empty { color: var(--soft); }
"""


def render_report(run: BenchRun, figures: Figures) -> str:
    """Return the page of a run."""
    title = f"{run.parameters.get('model', 'model')}: {_load_text(run)}"
    started = run.started_at.replace("T", " ").replace("+00:00", " UTC")
    cpu = str(run.environment.get("cpu", ""))
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in figures.warnings)
    plots = "".join(f'<section class="card"><h2>{escape(name)}</h2>{svg}</section>' for name, svg in draw_plots(run))
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>",
            f'<h1>{escape(title)}</h1><p class="sub">{escape(started)}, {escape(cpu)}</p>',
            f'<ul class="warnings">{warnings}</ul>' if warnings else "",
            f'<div class="tiles">{"".join(_tile(*tile) for tile in _tiles(figures))}</div>',
            f'<div class="plots">{plots}</div>',
            f'<section class="card wide"><h2>Latency, ms</h2>{_latency_table(figures)}</section>',
            '<div class="tables">',
            _table_card("Measured", _measured(figures)),
            _table_card("Parameters", _known(run.parameters)),
            _table_card("Generator and machine", {**_known(run.environment), **_generator(run)}),
            _table_card("Errors", {kind: f"{e['count']}: {e['example']}" for kind, e in figures.errors.items()}),
            "</div></main></body></html>",
            "",
        )
    )


def _load_text(run: BenchRun) -> str:
    parameters = run.parameters
    if parameters.get("rate_per_s") is not None:
        return f"{parameters['rate_per_s']:g} requests/s, open loop"
    if run.loop == "open":
        return "a trace's own times, open loop"
    return f"{parameters.get('concurrency')} requests in flight, closed loop"


def _tiles(figures: Figures) -> list[tuple[str, str]]:
    tiles = [
        ("time to first token, median", _ms(figures.ttft_s.p50)),
        ("inter-token latency, median", _ms(figures.itl_s.p50)),
        ("end to end, median", _ms(figures.e2e_s.p50)),
        ("output tokens/s", f"{figures.output_tokens_per_s:.1f}"),
        ("requests/s", f"{figures.requests_per_s:.2f}"),
    ]
    if figures.slo_share is not None and figures.goodput_requests_per_s is not None:
        tiles.append((f"goodput/s ({figures.slo_share:.0%} within SLO)", f"{figures.goodput_requests_per_s:.2f}"))
    return tiles


def _tile(name: str, value: str) -> str:
    return f'<div class="card tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _ms(value_s: float | None) -> str:
    return _NONE if value_s is None else f"{value_s * _MS_PER_S:.0f} ms"


def _latency_table(figures: Figures) -> str:
    rows = {
        "time to first token": figures.ttft_s,
        "inter-token latency": figures.itl_s,
        "time per output token": figures.tpot_s,
        "end to end": figures.e2e_s,
        "sent after its time": figures.send_lag_s,
    }
    head = "".join(f"<th>{name}</th>" for name in ("", "count", "mean", "min", "p50", "p90", "p95", "p99", "max"))
    body = "".join(f"<tr><th>{name}</th>{_cells(summary)}</tr>" for name, summary in rows.items() if summary.count)
    return f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cells(summary: Summary) -> str:
    values: Sequence[float | None] = (
        summary.mean,
        summary.min,
        summary.p50,
        summary.p90,
        summary.p95,
        summary.p99,
        summary.max,
    )
    texts = [str(summary.count), *(_NONE if value is None else f"{value * _MS_PER_S:.1f}" for value in values)]
    return "".join(f"<td>{text}</td>" for text in texts)


def _measured(figures: Figures) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "complete, failed, cancelled": f"{figures.num_complete}, {figures.num_failed}, {figures.num_cancelled}",
        "warm-up requests": figures.num_warmup,
        "window, s": f"{figures.window_s:.2f}",
        "input tokens per request (mean)": _mean(figures.input_tokens),
        "output tokens per request (mean)": _mean(figures.output_tokens),
        "input tokens/s": f"{figures.input_tokens_per_s:.1f}",
        "input tokens from cache": None if figures.cached_input_share is None else f"{figures.cached_input_share:.0%}",
        "finish reasons": ", ".join(f"{count} {reason}" for reason, count in figures.finish_reasons.items()),
        "builds": ", ".join(figures.build_ids),
    }
    for cost in figures.cost_of_usage:
        rows["billed"] = f"{cost_text(cost)} ({cost['num_requests']} requests)"
    if figures.cost_of_machine is not None:
        rows["machine time"] = cost_text(figures.cost_of_machine)
    if figures.energy is not None:
        kind = "estimated" if figures.energy["is_estimated"] else "measured"
        rows[f"energy, J ({kind})"] = f"{figures.energy['joules']:.1f}"
        rows["energy per output token, J"] = f"{figures.energy['joules_per_output_token']:.3f}"
    return _known(rows)


def _generator(run: BenchRun) -> dict[str, str]:
    return {
        "event loop, of one core": f"{run.generator.loop_share:.0%}",
        "generator, cores": f"{run.generator.num_cores:.2f}",
    }


def _mean(summary: Summary) -> str | None:
    return None if summary.mean is None else f"{summary.mean:.1f}"


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "", [])}


def _table_card(title: str, rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    body = "".join(
        f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    return f'<section class="card"><h2>{escape(title)}</h2><table>{body}</table></section>'
