"""The canary guard's counts: from the front door's counters to what a release did in a span of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from enginehouse_backends.front_door.routes import Route, RouteTable
from enginehouse_backends.server.release_models import routes_text
from enginehouse_backends.server.scrape import parse_metrics
from enginehouse_cli.canary import parse_by, parse_share
from enginehouse_cli.canary_guard import counts_between, read_totals, summary
from enginehouse_cli.live_server import sticky_point
from enginehouse_contract.errors import ConfigurationError
from enginehouse_contract.release import Release

if TYPE_CHECKING:
    from pathlib import Path

PAGE = """\
# TYPE nv_llm_front_door_requests_total counter
nv_llm_front_door_requests_total{release="r1",finish_reason="length",model="tensorrt_llm_bls"} 40
nv_llm_front_door_requests_total{release="r1",finish_reason="error",model="tensorrt_llm_bls"} 2
nv_llm_front_door_requests_total{release="r1",finish_reason="cancelled",model="tensorrt_llm_bls"} 5
nv_llm_front_door_requests_total{release="r2",finish_reason="timeout",model="tensorrt_llm_bls"} 1
nv_llm_front_door_time_to_first_token_ms_bucket{release="r1",le="10"} 3
nv_llm_front_door_time_to_first_token_ms_bucket{release="r1",le="25"} 30
nv_llm_front_door_time_to_first_token_ms_bucket{release="r1",le="+Inf"} 42
nv_llm_cost_total{release="r1",currency="USD"} 0.5
nv_llm_machine_seconds_total{release="r1"} 2
gen_ai_token_usage_total{release="r1",gen_ai_token_type="output"} 400
gen_ai_token_usage_total{release="r1",gen_ai_token_type="input"} 90
"""


def test_counts_since_the_beginning_and_since_a_reading() -> None:
    """Clients that left are no failures; buckets hold their own observations; what was before does not count."""
    totals = read_totals(parse_metrics(PAGE), ["r1", "r2"])
    counts = counts_between({}, totals["r1"])

    assert (counts.num_requests, counts.num_errors) == (42, 2)
    assert counts.first_token_ms == {10.0: 3, 25.0: 27, float("inf"): 12}
    assert (counts.amount, counts.machine_s, counts.num_output_tokens) == (0.5, 2.0, 400)
    assert counts_between({}, totals["r2"]).num_errors == 1
    nothing = counts_between(totals["r1"], totals["r1"])
    assert (nothing.num_requests, nothing.num_output_tokens, sum(nothing.first_token_ms.values())) == (0, 0, 0)


def test_figures_that_are_not_known_are_none() -> None:
    """No price, no tokens, no latency: nothing is shown as 0."""
    shown = summary(counts_between({}, {}))
    assert (shown["requests"], shown["errors"]) == (0, 0)
    assert {shown[name] for name in ("ttft_ms", "itl_ms", "price_per_request", "machine_s_per_token")} == {None}


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.25", 0.25), ("99.5%", 0.995)])
def test_shares(text: str, share: float) -> None:
    """In percent or as a fraction."""
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["0", "100%", "1", "-5%", "some", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    """Nothing, all, and words."""
    with pytest.raises(ConfigurationError, match="`--canary` must be a share"):
        parse_share(text)


def test_what_may_stick() -> None:
    """Tenants or requests."""
    assert parse_by("request") == "request"
    with pytest.raises(ConfigurationError, match="`--by` must be tenant or request; given user"):
        parse_by("user")


def test_request_ids_fall_where_the_front_door_reckons(tmp_path: Path) -> None:
    """The read-back after a switch aims at a release by its request id: both sides must reckon alike."""
    releases = [Release(number, f"sha256:{number}", tmp_path, "small") for number in (1, 2)]
    path = tmp_path / "routes.json"
    path.write_text(routes_text([(releases[0], 0.7), (releases[1], 0.3)]))
    table = RouteTable(path, Route("none", "none", "", "", ""))
    for number in range(200):
        key = f"request-{number}"
        assert table.choose(key).release == ("r1" if sticky_point(key) < 0.7 else "r2")
