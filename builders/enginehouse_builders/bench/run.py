"""One run as it was: what was asked of which machine, and every request's record. Figures follow from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.bench.records import RequestRecord, record_from_json, record_to_json
from enginehouse_builders.bench.slo import Slo
from enginehouse_contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT: Final = "enginehouse-bench"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """What the generator itself took: the event loop's thread, and the whole process with gRPC's threads."""

    wall_s: float
    loop_cpu_s: float
    process_cpu_s: float

    @property
    def loop_share(self) -> float:
        """Part of one core the event loop took; near 1 the generator is the bottleneck."""
        return self.loop_cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def num_cores(self) -> float:
        """Cores the whole process took, on average."""
        return self.process_cpu_s / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A measured run. ``parameters`` and ``environment`` are plain JSON values, for the reader."""

    started_at: str  # ISO 8601, UTC
    parameters: dict[str, Any]
    environment: dict[str, Any]
    generator: GeneratorLoad
    records: tuple[RequestRecord, ...]
    loop: str = "closed"
    duration_s: float | None = None  # None: the run ended with its last request
    slo: Slo = field(default_factory=Slo)
    machine_hour: str | None = None  # price of an hour of the machine, a decimal
    currency: str = "USD"

    @property
    def measured(self) -> tuple[RequestRecord, ...]:
        """The records that are not warm-up, in order of their intended time."""
        measured = (record for record in self.records if not record.is_warmup)
        return tuple(sorted(measured, key=lambda record: record.intended_at_s))

    @property
    def counted(self) -> tuple[RequestRecord, ...]:
        """The records whose tokens and ends in the window count for rates.

        Of a run by duration these are all, because warm-up runs into the window as measured requests run out of it;
        else the measured ones, which begin and end in it.
        """
        return self.measured if self.duration_s is None else self.records

    @property
    def window_s(self) -> tuple[float, float]:
        """Start and end of what is measured: the first measured request to the run's duration, or to the last end."""
        measured = self.measured
        if not measured:
            return 0.0, 0.0
        start_s = measured[0].intended_at_s
        if self.duration_s is not None:
            return start_s, start_s + self.duration_s
        return start_s, max(record.ended_at_s for record in measured)


def write_run(path: Path, run: BenchRun, figures: dict[str, Any], *, with_requests: bool = True) -> None:
    """Write a run with its figures as JSON."""
    path.write_text(
        json.dumps(run_to_json(run, figures, with_requests=with_requests), indent=1) + "\n", encoding="utf-8"
    )


def run_to_json(run: BenchRun, figures: dict[str, Any], *, with_requests: bool = True) -> dict[str, Any]:
    """Return a run as JSON values; without requests it can be read by people, not compared."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "started_at": run.started_at,
        "parameters": run.parameters,
        "environment": run.environment,
        "generator": asdict(run.generator),
        "loop": run.loop,
        "duration_s": run.duration_s,
        "slo_s": dict(run.slo.limits_s),
        "machine_hour": run.machine_hour,
        "currency": run.currency,
        "figures": figures,
    }
    if with_requests:
        values["requests"] = [record_to_json(record) for record in run.records]
    return values


def read_run(path: Path) -> BenchRun:
    """Read what :func:`write_run` wrote, with its requests.

    Raises :class:`InvalidRequestError` that says what is wrong with the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError:
        raise InvalidRequestError(f"{path}: is not JSON.") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise InvalidRequestError(f"{path}: is no result of `enginehouse bench`.")
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        message = f"{path}: has format version {version}; this Enginehouse reads {FORMAT_VERSION}. Measure again."
        raise InvalidRequestError(message)
    if "requests" not in values:
        raise InvalidRequestError(
            f"{path}: was written with --no-requests; comparing takes the requests. Run it again."
        )
    try:
        return BenchRun(
            started_at=values["started_at"],
            parameters=dict(values["parameters"]),
            environment=dict(values["environment"]),
            generator=GeneratorLoad(**values["generator"]),
            records=tuple(record_from_json(record) for record in values["requests"]),
            loop=values["loop"],
            duration_s=values["duration_s"],
            slo=Slo(tuple((name, float(limit_s)) for name, limit_s in values["slo_s"].items())),
            machine_hour=values["machine_hour"],
            currency=values["currency"],
        )
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InvalidRequestError(f"{path}: is damaged ({type(error).__name__}: {error}).") from None
