"""Figures of a run, its JSON, its page, and its comparison with another."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from enginehouse_builders.bench.compare import compare_runs
from enginehouse_builders.bench.figures import compute_figures, tokens_in_window
from enginehouse_builders.bench.plots import cdf, draw_plots, in_flight
from enginehouse_builders.bench.records import RequestRecord
from enginehouse_builders.bench.report import render_report
from enginehouse_builders.bench.run import BenchRun, GeneratorLoad, read_run, write_run
from enginehouse_builders.bench.slo import Slo, parse_slo
from enginehouse_contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

QUIET = GeneratorLoad(wall_s=10.0, loop_cpu_s=0.1, process_cpu_s=0.2)


def make_record(index: int, at_s: float, *, ttft_s: float = 0.2, gap_s: float = 0.1, **values: Any) -> RequestRecord:
    """A request of five pieces of a token each."""
    pieces = tuple(at_s + ttft_s + gap_s * number for number in range(5))
    defaults: dict[str, Any] = {
        "num_input_tokens": 10,
        "num_cached_input_tokens": 0,
        "num_output_tokens": 5,
        "finish_reason": "length",
        "build_id": "sha256:1",
        "piece_at_s": pieces,
    }
    return RequestRecord(index, at_s, at_s, pieces[-1], **{**defaults, **values})


def make_run(records: list[RequestRecord], **values: Any) -> BenchRun:
    """A closed-loop run of these records."""
    environment = {"cpu": "a cpu", "num_cpus": 2, "is_server_local": True}
    parameters = {"model": "m", "concurrency": 1}
    run = BenchRun("2026-01-01T00:00:00+00:00", parameters, environment, QUIET, tuple(records))
    return replace(run, **values)


def steady(count: int = 40, **values: Any) -> list[RequestRecord]:
    """Requests one after another, 0.6 s each, with a little spread."""
    return [make_record(i, 0.6 * i, ttft_s=0.2 + 0.01 * (i * 7 % 5), **values) for i in range(count)]


def test_latencies_count_from_when_a_request_should_have_been_sent() -> None:
    """A request that left a second late waited that second, too."""
    late = replace(make_record(0, 5.0), sent_at_s=6.0)

    assert late.ttft_s == pytest.approx(0.2)
    assert late.itl_s == pytest.approx((0.1,) * 4)
    assert late.tpot_s == pytest.approx(0.1)
    assert late.e2e_s == pytest.approx(0.6)
    assert compute_figures(make_run([late], loop="open")).send_lag_s.max == pytest.approx(1.0)


def test_several_tokens_in_a_piece_make_tokens_faster_than_pieces() -> None:
    """The gap between pieces is what a reader sees; time per token counts the server's tokens."""
    record = make_record(0, 0.0, num_output_tokens=9)

    assert record.mean_itl_s == pytest.approx(0.1)
    assert record.tpot_s == pytest.approx(0.05)


def test_warmup_failures_and_cancellations_are_told_apart() -> None:
    """Warm-up is in no figure; a failed request in no latency; a cancelled one has a first token and no end."""
    records = [
        make_record(0, 0.0, is_warmup=True, ttft_s=50.0),
        make_record(1, 1.0),
        make_record(2, 2.0, is_cancelled=True, num_output_tokens=None, ttft_s=0.4),
        RequestRecord(3, 3.0, 3.0, 3.1, error_kind="OverloadedError", error="full"),
    ]
    figures = compute_figures(make_run(records))

    assert (figures.num_requests, figures.num_complete, figures.num_failed, figures.num_cancelled) == (3, 1, 1, 1)
    assert figures.num_warmup == 1
    assert (figures.ttft_s.count, figures.ttft_s.max) == (2, pytest.approx(0.4))
    assert (figures.e2e_s.count, figures.tpot_s.count) == (1, 1)
    assert figures.errors == {"OverloadedError": {"count": 1, "example": "full"}}
    assert any("1 of 3 requests failed" in warning for warning in figures.warnings)


def test_rates_are_over_the_window() -> None:
    """40 requests of five tokens in 24 s; by duration, what came in that time, whoever asked for it."""
    records = steady()
    whole = compute_figures(make_run(records))
    half = compute_figures(make_run(records, duration_s=12.0))

    assert whole.window_s == pytest.approx(0.6 * 39 + records[-1].e2e_s)
    assert whole.requests_per_s == pytest.approx(40 / whole.window_s)
    assert whole.output_tokens_per_s == pytest.approx(200 / whole.window_s)
    assert half.window_s == 12.0
    assert half.requests_per_s == pytest.approx(sum(r.ended_at_s <= 12 for r in records) / 12)


def test_a_requests_tokens_are_spread_over_its_pieces() -> None:
    """Of ten tokens in five pieces, those of two pieces are four."""
    record = make_record(0, 0.0, num_output_tokens=10)

    assert tokens_in_window([record], 0.0, 0.35) == pytest.approx(4)


def test_goodput_counts_answers_within_every_limit() -> None:
    """Whole answers whose first token and gaps are fast enough; failures count against it, cancellations do not."""
    slo = parse_slo("ttft=300ms,itl=150ms")
    records = [
        make_record(0, 0.0),
        make_record(1, 1.0, ttft_s=0.5),
        make_record(2, 2.0, gap_s=0.2),
        make_record(3, 3.0, is_cancelled=True),
        RequestRecord(4, 4.0, 4.0, 4.1, error_kind="X", error="x"),
    ]
    figures = compute_figures(make_run(records, slo=slo))

    assert figures.slo_share == pytest.approx(1 / 4)
    assert figures.goodput_requests_per_s == pytest.approx(1 / figures.window_s)
    assert compute_figures(make_run(records)).goodput_requests_per_s is None


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=-1ms", "speed=3ms", "ttft=1s,ttft=2s", "ttft=1s;itl=2s"])
def test_an_slo_that_is_none_is_refused(text: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(InvalidRequestError, match="ttft=200ms,itl=50ms"):
        parse_slo(text)


def test_costs_and_energy_are_the_servers_where_it_tells() -> None:
    """Sums over the answers that have them, exact in money; unknown stays unknown."""
    records = steady(4, cost=Decimal("0.000001"), currency="EUR", energy_joules=2.5, is_energy_estimated=True)
    records.append(make_record(4, 9.0))
    figures = compute_figures(make_run(records, machine_hour="3.6"))

    assert figures.cost_of_usage == [
        {
            "currency": "EUR",
            "num_requests": 4,
            "amount": "0.000004",
            "num_output_tokens": 20,
            "per_million_output_tokens": "0.2",
        }
    ]
    assert figures.energy == {"joules": 10.0, "joules_per_output_token": 0.5, "num_requests": 4, "is_estimated": True}
    assert figures.cost_of_machine is not None
    assert float(figures.cost_of_machine["amount"]) == pytest.approx(figures.window_s * 0.001)
    unknown = compute_figures(make_run(steady(4)))
    assert (unknown.cost_of_usage, unknown.cost_of_machine, unknown.energy) == ([], None, None)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"generator": GeneratorLoad(10.0, 9.0, 9.5), "environment": {"is_server_local": False}}, "is the bottleneck"),
        ({"generator": GeneratorLoad(10.0, 1.0, 4.0)}, "20% of this machine's 2 cores"),
        ({"loop": "open", "records": tuple(replace(r, sent_at_s=r.sent_at_s + 0.15) for r in steady())}, "150 ms late"),
        ({"loop": "open", "records": tuple(make_record(i, 0.01 * i) for i in range(40))}, "outran the server"),
        ({"records": tuple(steady(5))}, "only 5 requests"),
        ({"records": tuple(steady(num_cached_input_tokens=8))}, "80% of the input came from the server's prefix cache"),
    ],
)
def test_what_would_mislead_is_said(values: dict[str, Any], word: str) -> None:
    """A generator at its limit or late, a growing queue, few requests, a cache that knows the prompts."""
    warnings = compute_figures(replace(make_run(steady()), **values)).warnings

    assert len(warnings) == 1
    assert word in warnings[0]


def test_a_healthy_run_has_no_warnings() -> None:
    """Nothing is said when nothing is to be said."""
    assert compute_figures(make_run(steady())).warnings == []
    assert compute_figures(make_run(steady(), loop="open")).warnings == []


def test_an_empty_run_has_figures_and_a_page() -> None:
    """A run in which nothing was measured divides by nothing."""
    run = make_run([])
    figures = compute_figures(run)

    assert (figures.num_requests, figures.output_tokens_per_s) == (0, 0.0)
    assert "nothing to show" in render_report(run, figures)


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    """Records, limits and money survive; figures computed again are the same."""
    run = make_run(
        steady(cost=Decimal("0.000000000003"), currency="EUR", energy_joules=1.0, is_energy_estimated=False),
        slo=Slo((("ttft", 0.2),)),
        machine_hour="0.40",
        duration_s=9.0,
    )
    write_run(tmp_path / "run.json", run, compute_figures(run).to_json())
    back = read_run(tmp_path / "run.json")

    assert len(back.records) == len(run.records)
    assert back.records[3].cost == Decimal("0.000000000003")
    assert (back.slo, back.machine_hour, back.duration_s) == (run.slo, "0.40", 9.0)
    assert compute_figures(back).output_tokens_per_s == pytest.approx(
        compute_figures(run).output_tokens_per_s, rel=1e-4
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda _: "{", "is not JSON"),
        (lambda _: "[]", "no result of `enginehouse bench`"),
        (lambda v: json.dumps({**v, "format_version": 99}), "has format version 99"),
        (lambda v: json.dumps({k: v[k] for k in v if k != "requests"}), "--no-requests"),
        (lambda v: json.dumps({**v, "requests": [{"index": 1}]}), "is damaged"),
        (lambda v: json.dumps({**v, "requests": [{**v["requests"][0], "surprise": 1}]}), "is damaged"),
        (lambda v: json.dumps({**v, "generator": None}), "is damaged"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, change: Any, word: str) -> None:
    """The message names the file and what is wrong."""
    path, run = tmp_path / "run.json", make_run(steady(2))
    write_run(path, run, compute_figures(run).to_json())
    path.write_text(change(json.loads(path.read_text())))

    with pytest.raises(InvalidRequestError, match=r"run\.json") as raised:
        read_run(path)

    assert word in str(raised.value)


class Page(HTMLParser):
    """Checks that every element is closed, and collects what would load something."""

    VOID = frozenset({"meta", "!doctype", "line", "circle", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in {"src", "href", "srcset", "data"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    """Well nested, six plots, no script, nothing from the network; what servers say is escaped."""
    records = [*steady(), RequestRecord(99, 3.0, 3.0, 3.1, error_kind="E", error="<script>alert(1)</script>")]
    run = make_run(records, slo=parse_slo("ttft=220ms,e2e=1s"))
    text = render_report(run, compute_figures(run))
    page = Page(text)

    assert page.open == []
    assert page.loads == []
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags
    assert "url(" not in text
    assert "SLO 220 ms" in text
    assert "nan" not in re.sub(r"[a-z]{2,}", "", text.lower())


def test_plots_show_what_was_recorded() -> None:
    """The distribution ends at 1, requests in flight rise and fall to 0, and no point is outside the plot."""
    run = make_run(steady(50))
    counts = [count for _, count in in_flight(run.records)]

    assert cdf([3.0, 1.0, 2.0])[-1] == (3.0, 1.0)
    assert (max(counts), counts[-1]) == (2.0, 0.0)  # spread makes some overlap
    for _, svg in draw_plots(run):
        numbers = [float(value) for value in re.findall(r'c[xy]="(-?[\d.]+)"', svg)]
        assert all(0 <= value <= 560 for value in numbers)


def verdicts(a: BenchRun, b: BenchRun) -> dict[str, str]:
    """Return each metric's verdict."""
    return {metric.name: metric.verdict for metric in compare_runs(a, b).metrics}


def test_a_run_is_like_itself() -> None:
    """Every metric of a run against itself is within noise, with a ratio of 1."""
    run = make_run(steady(120, cost=Decimal("0.01"), currency="EUR", energy_joules=1.0), slo=parse_slo("ttft=220ms"))
    comparison = compare_runs(run, run)

    assert {metric.verdict for metric in comparison.metrics} == {"within noise"}
    assert {metric.ratio.ratio for metric in comparison.metrics if metric.ratio} == {1.0}
    assert len(comparison.metrics) == 11
    assert (comparison.differing_parameters, comparison.warnings) == ({}, ())


def test_a_slower_run_is_worse_in_the_right_direction() -> None:
    """Later first tokens and fewer tokens per second are worse for B and better the other way round."""
    fast = make_run(steady())
    slow = make_run([make_record(i, 1.2 * i, ttft_s=0.5 + 0.01 * (i % 5), gap_s=0.2) for i in range(40)])

    forth, back = verdicts(fast, slow), verdicts(slow, fast)

    assert (forth["ttft_p50"], forth["itl_p50"], forth["output_tokens_per_s"]) == ("worse",) * 3
    assert (back["ttft_p50"], back["itl_p50"], back["output_tokens_per_s"]) == ("better",) * 3
    assert "ttft_p99" not in forth


def test_what_makes_runs_unlike_is_said() -> None:
    """Other parameters, another machine, failures, caches, currencies, and too few values for any verdict."""
    a = make_run(steady(3, cost=Decimal(1), currency="EUR"))
    b = make_run(
        [
            *steady(3, cost=Decimal(1), currency="USD", num_cached_input_tokens=9),
            RequestRecord(9, 0, 0, 1, error_kind="E"),
        ],
        parameters={"model": "m", "concurrency": 8},
        environment={"cpu": "another"},
        slo=parse_slo("ttft=1s"),
    )
    comparison = compare_runs(a, b)
    said = " ".join(comparison.warnings)

    assert comparison.differing_parameters == {"concurrency": (1, 8)}
    for words in ("a cpu and another", "1 of 4 requests of B failed", "prefix cache", "SLO", "several currencies"):
        assert words in said
    assert {metric.verdict for metric in comparison.metrics if metric.name == "ttft_p50"} == {"unknown"}
    assert "cost_per_million_output_tokens" not in {metric.name for metric in comparison.metrics}
    assert json.dumps(comparison.to_json())
