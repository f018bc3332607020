"""A change to several servers in turn: who is asked first, when it halts, and who serves what at the end.

Nothing here knows how a host is reached. Every host is asked what it serves before the first is changed, so that one
that is down stops a rollout before it began. The change itself is the host's own promotion, which is safe by itself: a
host that fails keeps its old release. Running the same rollout again goes on where it halted, since a host that serves
the build already has nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

from enginehouse_contract.errors import EnginehouseError, EngineUnavailableError, PromotionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Outcome = Literal["changed", "already", "failed", "unreachable", "not tried"]

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_UNREACHABLE: Final = 3


@dataclass(frozen=True, slots=True)
class Serving:
    """What a host answers from; both empty where nothing is in production yet."""

    release: str
    build_id: str


class Host(Protocol):
    """One server, however it is reached; raises errors of our tree, :class:`EngineUnavailableError` when it is not."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        ...

    def serving(self) -> Serving:
        """Return what is in production there."""
        ...


@dataclass(frozen=True, slots=True)
class HostReport:
    """What became of one host."""

    host: str
    outcome: Outcome
    before: Serving | None = None
    after: Serving | None = None  # None: not known
    error: str = ""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What became of all of them, in the order of the rollout."""

    hosts: tuple[HostReport, ...]

    @property
    def exit_code(self) -> int:
        """0: every host is as asked; 3: one could not be reached; 1: one failed."""
        outcomes = {host.outcome for host in self.hosts}
        if "unreachable" in outcomes:
            return EXIT_UNREACHABLE
        return EXIT_FAILED if outcomes & {"failed", "not tried"} else EXIT_DONE

    @property
    def summary(self) -> str:
        """One sentence: how many of them, and why it halted."""
        num_right = sum(host.outcome in {"changed", "already"} for host in self.hosts)
        text = f"{num_right} of {len(self.hosts)} servers are as asked"
        bad = next((host for host in self.hosts if host.outcome in {"failed", "unreachable"}), None)
        return f"{text}." if bad is None else f"{text}; halted at {bad.host}: {bad.error}"


def roll_out(
    hosts: Sequence[Host],
    change: Callable[[Host], Serving],
    *,
    must_serve: str | None = None,
    progress: Callable[[str, float], None] = lambda _stage, _done: None,
) -> FleetReport:
    """Apply *change* to each host in turn, and read back what it serves; halt at the first that fails.

    *must_serve* is the build that every host has to serve afterwards; where it is None, the first host's is: one name
    that means other builds on other hosts halts the rollout.
    """
    reports = [_ask(host, progress) for host in hosts]
    if any(report.outcome == "unreachable" for report in reports):
        return FleetReport(tuple(reports))
    for index, host in enumerate(hosts):
        progress(f"changing {host.name}", index / len(hosts))
        reports[index] = _change(host, change, reports[index], must_serve)
        if reports[index].outcome in {"failed", "unreachable"}:
            break
        after = reports[index].after
        assert after is not None, "it was read back"
        must_serve = must_serve or after.build_id
    return FleetReport(tuple(reports))


def look(hosts: Sequence[Host], progress: Callable[[str, float], None] = lambda _stage, _done: None) -> FleetReport:
    """Return what every host serves, changing nothing."""
    reports = [_ask(host, progress) for host in hosts]
    return FleetReport(tuple(r if r.outcome == "unreachable" else replace(r, outcome="already") for r in reports))


def _ask(host: Host, progress: Callable[[str, float], None]) -> HostReport:
    progress(f"asking {host.name}", 0.0)
    try:
        serving = host.serving()
    except EnginehouseError as error:
        return HostReport(host.name, "unreachable", error=str(error))
    return HostReport(host.name, "not tried", before=serving, after=serving)


def _change(host: Host, change: Callable[[Host], Serving], report: HostReport, must_serve: str | None) -> HostReport:
    try:
        claimed = change(host)
        serving = host.serving()
        expected = must_serve or claimed.build_id
        if serving.build_id != expected:
            msg = f"it serves {serving.build_id[:19] or 'nothing'}, not {expected[:19]}."
            return replace(report, outcome="failed", after=serving, error=msg)
    except EngineUnavailableError as error:
        return replace(report, outcome="unreachable", after=None, error=str(error))
    except EnginehouseError as error:
        return replace(report, outcome="failed", after=_serving_if_known(host), error=str(error))
    return replace(report, outcome="already" if serving == report.before else "changed", after=serving)


def _serving_if_known(host: Host) -> Serving | None:
    try:
        return host.serving()
    except EnginehouseError:
        return None


def require_distinct(hosts: Sequence[Host]) -> None:
    """Raise :class:`PromotionError` for a host named twice, or none at all."""
    names = [host.name for host in hosts]
    if not names:
        raise PromotionError("no server was named; give --server or --file.")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PromotionError(f"the server {twice} is named twice.")
