"""What a run asks, and when: lengths, arrivals, traces and the requests that a seed decides."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from enginehouse_builders.bench.arrivals import arrival_times_s
from enginehouse_builders.bench.lengths import MAX_LENGTH, parse_lengths
from enginehouse_builders.bench.trace import TraceLine, read_trace
from enginehouse_builders.bench.workload import Workload, plan_requests
from enginehouse_contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path


def make_workload(**values: Any) -> Workload:
    """A closed loop of ten requests, or what *values* make of it."""
    lengths = {"input_tokens": parse_lengths("16", "i"), "output_tokens": parse_lengths("8", "o")}
    defaults: dict[str, Any] = {**lengths, "concurrency": 2, "num_requests": 10}
    return Workload(**{**defaults, **values})


def draw(text: str, count: int = 4000) -> np.ndarray[Any, Any]:
    """Draw many lengths."""
    lengths, random = parse_lengths(text, "input_tokens"), np.random.default_rng(3)
    return np.array([lengths.draw(random) for _ in range(count)])


def test_lengths_follow_their_distribution(tmp_path: Path) -> None:
    """Fixed, uniform with both ends, lognormal by its median and sigma, and the numbers of a file."""
    (tmp_path / "lengths").write_text("5\n\n9\n")
    uniform, lognormal = draw("uniform:3,6"), draw("lognormal:100,0.5")

    assert set(draw("64")) == {64}
    assert set(uniform) == {3, 4, 5, 6}
    assert np.median(lognormal) == pytest.approx(100, rel=0.05)
    assert np.std(np.log(lognormal)) == pytest.approx(0.5, rel=0.05)
    assert set(draw(f"file:{tmp_path / 'lengths'}")) == {5, 9}


def test_a_heavy_tail_stays_a_possible_length() -> None:
    """However wide the distribution, a length is at least 1 and at most the limit."""
    values = draw("lognormal:1000,9")

    assert values.min() >= 1
    assert values.max() == MAX_LENGTH


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-3",
        "many",
        "nan",
        "inf",
        "uniform:5",
        "uniform:9,3",
        "uniform:0,3",
        "lognormal:0,1",
        "lognormal:5,-1",
        "zipf:3",
        "",
    ],
)
def test_lengths_that_are_none_are_refused_by_name(text: str) -> None:
    """The message names the option and what was given."""
    with pytest.raises(InvalidRequestError, match="`input_tokens`"):
        parse_lengths(text, "input_tokens")


def test_a_file_of_lengths_is_refused_with_its_line(tmp_path: Path) -> None:
    """A line that is no length is named; so is a file that is not there, or empty."""
    path = tmp_path / "lengths"
    path.write_text("5\nfive\n")
    with pytest.raises(InvalidRequestError, match=r"lengths:2: .*'five'"):
        parse_lengths(f"file:{path}", "input_tokens")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        parse_lengths(f"file:{path}x", "input_tokens")
    path.write_text("\n")
    with pytest.raises(InvalidRequestError, match="without a length"):
        parse_lengths(f"file:{path}", "input_tokens")


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 4.0])
def test_arrivals_keep_their_rate_and_their_burstiness(burstiness: float) -> None:
    """The mean gap is one over the rate; the squared coefficient of variation of the gaps is the burstiness."""
    times = list(itertools.islice(arrival_times_s(5.0, burstiness, np.random.default_rng(1)), 40_000))
    gaps = np.diff([0.0, *times])

    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.1, abs=1e-9)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1), (1, -1)])
def test_arrivals_that_are_none_are_refused(rate: float, burstiness: float) -> None:
    """A rate is above 0 and finite; a burstiness at least 0."""
    with pytest.raises(InvalidRequestError, match="must be"):
        make_workload(concurrency=None, rate_per_s=rate, burstiness=burstiness)


def write_trace(tmp_path: Path, *lines: str) -> Path:
    """Write a trace."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    """Every key arrives; blank lines are skipped."""
    path = write_trace(
        tmp_path,
        '{"at": 2, "input_tokens": 7, "tenant": "a", "priority": 3}',
        "",
        '{"at": 0.5, "prompt": "x", "max_tokens": 4}',
    )

    assert read_trace(path) == [
        TraceLine(0.5, prompt="x", max_tokens=4),
        TraceLine(2, num_input_tokens=7, tenant="a", priority=3),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"at": -1}', "`at` must be seconds"),
        ('{"at": NaN}', "`at` must be seconds"),
        ('{"at": 1, "max_tokens": 0}', "`max_tokens` must be a whole number"),
        ('{"at": 1, "max_tokens": true}', "`max_tokens` must be a whole number"),
        ('{"at": 1, "prompt": ""}', "`prompt` must be text"),
        ('{"at": 1, "max_token": 3}', "Did you mean `max_tokens`"),
        ('{"at": 1, "zzz": 3}', "Known: at, prompt"),
        ('{"at": 1, "prompt": "x", "input_tokens": 3}', "give one of them"),
        ('{"prompt": "x"}', "has no `at`"),
    ],
)
def test_a_bad_trace_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    """File, line number and what is wrong with it."""
    path = write_trace(tmp_path, '{"at": 0}', line)

    with pytest.raises(InvalidRequestError, match=r"trace\.jsonl:2: ") as raised:
        read_trace(path)

    assert problem in str(raised.value)


@pytest.mark.parametrize("text", [None, "", "\n\n", b"\xff"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, text: str | bytes | None) -> None:
    """No file, an empty one, or one that is no text."""
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(InvalidRequestError, match="the trace"):
        read_trace(path)


def test_a_seed_decides_everything_and_the_rate_only_the_times() -> None:
    """The same seed asks the same; another rate asks the same at other times; another seed asks something else."""
    workload = make_workload(
        concurrency=None, rate_per_s=2.0, input_tokens=parse_lengths("uniform:4,40", "i"), cancel_share=0.5
    )
    first, again = list(plan_requests(workload)), list(plan_requests(workload))
    faster = list(plan_requests(replace(workload, rate_per_s=9.0)))
    other = list(plan_requests(replace(workload, seed=1)))

    assert first == again
    assert [replace(request, at_s=None) for request in first] == [replace(request, at_s=None) for request in faster]
    assert first != faster
    assert not {request.prompt for request in first} & {request.prompt for request in other}


def test_warmup_comes_first_and_is_not_counted() -> None:
    """Of ten measured requests and three of warm-up, thirteen are sent."""
    requests = list(plan_requests(make_workload(num_warmup_requests=3)))

    assert [request.is_warmup for request in requests] == [True] * 3 + [False] * 10


def test_a_duration_counts_from_the_first_measured_request() -> None:
    """Arrivals end a duration after the warm-up, and reach nearly until there."""
    workload = make_workload(
        concurrency=None, rate_per_s=50.0, burstiness=0.0, num_requests=None, duration_s=2.0, num_warmup_requests=10
    )
    requests = list(plan_requests(workload))

    assert requests[10].at_s == pytest.approx(11 / 50)
    assert len(requests) in {110, 111}  # the last falls on the end


def test_a_trace_with_times_is_played_once_and_as_it_is() -> None:
    """Its times, prompts, limits and tenants are those of the requests; what it leaves open the options decide."""
    trace = [TraceLine(0.0, prompt="x", max_tokens=3, tenant="a", priority=2), TraceLine(1.5, num_input_tokens=5)]
    requests = list(plan_requests(make_workload(concurrency=None, num_requests=None, trace=trace, tenant="z")))

    assert [request.at_s for request in requests] == [0.0, 1.5]
    assert (requests[0].prompt, requests[0].max_tokens, requests[0].tenant, requests[0].priority) == ("x", 3, "a", 2)
    assert (len(requests[1].prompt.split()), requests[1].max_tokens, requests[1].tenant) == (5, 8, "z")


def test_a_trace_without_times_is_repeated_in_a_closed_loop() -> None:
    """Ten requests of a trace of two."""
    requests = list(plan_requests(make_workload(trace=[TraceLine(prompt="a"), TraceLine(prompt="b")])))

    assert [request.prompt for request in requests] == ["a", "b"] * 5


def test_shared_prefixes_are_shared_and_part_of_the_length() -> None:
    """Prompts of 16 tokens begin with one of two prefixes of 12, and differ after it."""
    requests = list(plan_requests(make_workload(num_shared_prefix_tokens=12, num_prefixes=2)))
    words = [request.prompt.split() for request in requests]

    assert {len(prompt) for prompt in words} == {16}
    assert len({tuple(prompt[:12]) for prompt in words}) == 2
    assert len({tuple(prompt) for prompt in words}) == 10


def test_the_cancelled_share_is_cancelled_within_the_answer() -> None:
    """About the asked part of the requests, each before its last token."""
    requests = list(plan_requests(make_workload(num_requests=2000, cancel_share=0.3)))
    cancels = [request.cancel_after_pieces for request in requests if request.cancel_after_pieces is not None]

    assert len(cancels) / 2000 == pytest.approx(0.3, abs=0.04)
    assert set(cancels) == set(range(1, 8))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": None}, "concurrency"),
        ({"rate_per_s": 1.0}, "rate"),
        ({"num_requests": 0}, "num_requests"),
        ({"num_warmup_requests": -1}, "warmup"),
        ({"duration_s": 0.0}, "duration"),
        ({"duration_s": float("nan")}, "duration"),
        ({"cancel_share": 1.5}, "cancel_share"),
        ({"num_shared_prefix_tokens": -1}, "shared_prefix"),
        ({"num_prefixes": 0}, "num_prefixes"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_workload_that_cannot_be_run_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    """The option that is wrong is named."""
    with pytest.raises(InvalidRequestError, match=f"`{name}`"):
        make_workload(**values)
