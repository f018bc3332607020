"""Rollouts over scripted hosts: order, halts, resumption, and the report."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from enginehouse_builders.fleet.rollout import FleetReport, Host, Serving, look, require_distinct, roll_out
from enginehouse_contract.errors import EngineUnavailableError, PromotionError


@dataclass
class ScriptedHost:
    """Serves a build; ``fails`` says what its next promotion does instead, ``is_down`` that nobody answers."""

    name: str
    build_id: str = "old"
    fails: str = ""
    is_down: bool = False
    log: list[str] = field(default_factory=list)

    def serving(self) -> Serving:
        self.log.append("ask")
        if self.is_down:
            raise EngineUnavailableError("no route to host")
        return Serving(f"r-{self.build_id}", self.build_id)

    def promote(self, build_id: str) -> Serving:
        self.log.append("promote")
        if self.fails == "dies":
            self.is_down = True
            raise EngineUnavailableError("connection lost")
        if self.fails == "refuses":
            raise PromotionError("its gates did not pass")
        if self.fails != "lies":
            self.build_id = build_id
        return Serving(f"r-{build_id}", build_id)


def promote(host: Host) -> Serving:
    """The change of these tests."""
    assert isinstance(host, ScriptedHost)
    return host.promote("new")


def outcomes(report: FleetReport) -> list[str]:
    """What became of each."""
    return [host.outcome for host in report.hosts]


def test_all_are_changed_in_turn() -> None:
    """Each is asked first, then changed and read back, in the order given."""
    hosts = [ScriptedHost(name) for name in "abc"]

    report = roll_out(hosts, promote)

    assert outcomes(report) == ["changed"] * 3
    assert report.exit_code == 0
    assert report.summary == "3 of 3 servers are as asked."
    assert [host.log for host in hosts] == [["ask", "promote", "ask"]] * 3


@pytest.mark.parametrize(
    ("fails", "outcome", "code", "served"),
    [("refuses", "failed", 1, "old"), ("lies", "failed", 1, "old"), ("dies", "unreachable", 3, None)],
)
def test_the_first_failure_halts_it(fails: str, outcome: str, code: int, served: str | None) -> None:
    """The hosts before keep the new build, the failed one keeps the old, the rest is not touched, as reported."""
    hosts = [ScriptedHost("a"), ScriptedHost("b", fails=fails), ScriptedHost("c")]

    report = roll_out(hosts, promote)

    assert outcomes(report) == ["changed", outcome, "not tried"]
    assert report.exit_code == code
    assert report.hosts[1].after == (None if served is None else Serving("r-old", served))
    assert report.summary.startswith("1 of 3 servers are as asked; halted at b: ")
    assert hosts[2].log == ["ask"]


def test_it_goes_on_where_it_halted() -> None:
    """The same command again: hosts that serve the build have nothing to do, the others are changed."""
    hosts = [ScriptedHost("a"), ScriptedHost("b", fails="refuses"), ScriptedHost("c")]
    roll_out(hosts, promote)
    hosts[1].fails = ""

    assert outcomes(roll_out(hosts, promote)) == ["already", "changed", "changed"]


def test_a_host_that_is_down_stops_it_before_it_begins() -> None:
    """Nothing is changed anywhere while one cannot be asked."""
    hosts = [ScriptedHost("a"), ScriptedHost("b", is_down=True)]

    report = roll_out(hosts, promote)

    assert outcomes(report) == ["not tried", "unreachable"]
    assert report.exit_code == 3
    assert hosts[0].build_id == "old"


def test_one_name_that_means_other_builds_halts_it() -> None:
    """A model's name is looked up on each host: where it finds another build, that is a failure."""
    hosts = [ScriptedHost("a"), ScriptedHost("b")]

    report = roll_out(hosts, lambda host: host.promote(f"new-{host.name}"))  # type: ignore[attr-defined]

    assert outcomes(report) == ["changed", "failed"]
    assert report.hosts[1].error == "it serves new-b, not new-a."


def test_looking_changes_nothing() -> None:
    """Status asks each host once."""
    hosts = [ScriptedHost("a"), ScriptedHost("b", is_down=True)]

    report = look(hosts)

    assert outcomes(report) == ["already", "unreachable"]
    assert [host.log for host in hosts] == [["ask"], ["ask"]]


@pytest.mark.parametrize("names", ["", "aba"])
def test_no_host_and_a_host_twice_are_refused(names: str) -> None:
    """A list that cannot be meant is refused before anything is asked."""
    with pytest.raises(PromotionError, match=r"no server|named twice"):
        require_distinct([ScriptedHost(name) for name in names])


@pytest.mark.parametrize("seed", range(200))
def test_whatever_fails_the_rules_hold(seed: int) -> None:
    """Random failures: what was changed is a prefix, only the last touched may have failed, and runs end in success."""
    rng = random.Random(seed)
    hosts = [ScriptedHost(f"h{index}") for index in range(rng.randint(1, 6))]
    for _ in range(20):
        for host in hosts:
            host.fails = rng.choice(["", "", "refuses", "dies", "lies"])
            host.is_down = rng.random() < 0.05
        before = [host.build_id for host in hosts]
        report = roll_out(hosts, promote)
        done = [host.build_id == "new" for host in hosts]
        assert done == sorted(done, reverse=True)
        assert all(
            after == "new" for was, after in zip(before, (host.build_id for host in hosts), strict=True) if was == "new"
        )
        bad = [index for index, outcome in enumerate(outcomes(report)) if outcome in {"failed", "unreachable"}]
        assert (report.exit_code == 0) == (not bad) == all(done[: len(done)] if not bad else [False])
        assert all(
            host.after is None or host.after.build_id == hosts[i].build_id for i, host in enumerate(report.hosts)
        )
    for host in hosts:
        host.fails, host.is_down = "", False

    assert roll_out(hosts, promote).exit_code == 0
    assert {host.build_id for host in hosts} == {"new"}
