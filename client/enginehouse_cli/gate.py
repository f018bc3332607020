"""`enginehouse gate`: prove a build before it is promoted."""

from __future__ import annotations

import json
import signal
import time
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Optional

import typer
from rich.table import Table

from enginehouse_cli.console import EXIT_FAILED, Stopwatch, print_json, progress_bar, stdout
from enginehouse_cli.ledger import open_ledger
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from enginehouse_builders.gates import GateRecord, GateResult
    from enginehouse_builders.gates.run import GateOptions
    from enginehouse_builders.gates.services import GateTools
    from enginehouse_builders.spec.model import Costs, Spec
    from enginehouse_builders.store import StoredBuild
    from enginehouse_contract.settings import Settings

_SHOWN: Final[dict[str, tuple[str, ...]]] = {
    "memory": ("weights_bytes", "least_bytes"),
    "numeric": ("token_agreement", "mean_kl_divergence", "perplexity", "reference_perplexity", "perplexity_ratio"),
    "speed": ("tokens_per_s", "ttft_ms", "itl_ms", "throughput_ratio", "ttft_ratio", "itl_ratio"),
    "cost": ("cost_per_million_output_tokens", "cost_ratio", "machine_s_per_million_output_tokens"),
}
_MAX_PLAIN: Final = 10**6  # larger numbers are told with an exponent
_MARKS: Final = {"passed": "[green]passed[/]", "failed": "[red]failed[/]", "skipped": "[yellow]skipped[/]"}


def gate(
    build: Annotated[str, typer.Argument(help="Build id, the start of one, a name, or a folder.")],
    against: Annotated[
        Optional[str], typer.Option("--against", help="The reference build to agree and keep up with.")
    ] = None,
    prompts: Annotated[
        Optional[Path],
        typer.Option("--prompts", help="Your own prompts beside the shipped ones: JSON lines with `prompt`."),
    ] = None,
    spec: Annotated[
        Optional[Path],
        typer.Option("--spec", help="A spec whose `gates` are the thresholds and whose `costs` are the machine's."),
    ] = None,
    url: Annotated[
        Optional[str],
        typer.Option(
            "--url",
            help="host:port (gRPC) of a running server in explicit mode that sees the builds' folders; they are loaded "
            "there under names of their own. Default: private servers.",
        ),
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Run every gate over a build and keep the record. Exit code 0: passed; 1: failed."""
    from enginehouse_builders.gates import write_record  # noqa: PLC0415 - commands import what they use
    from enginehouse_builders.gates.run import GateRun  # noqa: PLC0415
    from enginehouse_builders.store import find_build  # noqa: PLC0415
    from enginehouse_cli.remote import fetch_if_remote  # noqa: PLC0415

    settings = load_settings()
    found = find_build(settings.store_dir, fetch_if_remote(build))
    reference = None if against is None else find_build(settings.store_dir, fetch_if_remote(against))
    options = _options(settings, prompts, None if spec is None else _read_spec(spec))
    tools = _tools(settings, url, found)
    watch = Stopwatch.start()
    with _ended_by_signals(), progress_bar(f"gate {found.manifest.model_name}") as report:
        record = GateRun(tools, found, reference, options, report).run()
    record, path = write_record(settings.home, record)
    if as_json:
        print_json({**json.loads(record.to_json()), "record": str(path)})
    else:
        _print(record, path, watch.elapsed_s)
    if not record.passed:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the gates as Ctrl-C does: servers are stopped and shadow models unloaded."""

    def interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        raise KeyboardInterrupt

    previous = {kind: signal.signal(kind, interrupt) for kind in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def _tools(settings: Settings, url: str | None, build: StoredBuild) -> GateTools:
    from enginehouse_backends.server.binary import require_host  # noqa: PLC0415
    from enginehouse_builders.gates import describe_host  # noqa: PLC0415
    from enginehouse_cli.gate_tools import PrivateServers, ShadowModels  # noqa: PLC0415

    if url is not None:
        return ShadowModels(_grpc_target(url))
    if build.manifest.target != "cpu" and describe_host().gpus:
        hint = "Start one in explicit mode and give its address: the private servers hold the CPU engine only."
        raise ConfigurationError(refusal("--url", "must name a server with NVIDIA's backend for this build", hint=hint))
    require_host()  # a host without a server says nothing about the build
    return PrivateServers(settings)


def _grpc_target(url: str) -> str:
    from enginehouse_client._transport import parse_address  # noqa: PLC0415

    is_http, target = parse_address(url)
    if is_http:
        raise ConfigurationError(refusal("--url", "must be host:port of the server's gRPC", given=url))
    return target


def _options(settings: Settings, prompts: Path | None, spec: Spec | None) -> GateOptions:
    from enginehouse_builders.gates.prompts import read_prompts  # noqa: PLC0415
    from enginehouse_builders.gates.run import GateOptions  # noqa: PLC0415
    from enginehouse_builders.spec.model import Gates  # noqa: PLC0415

    thresholds = Gates() if spec is None else spec.gates
    files = [Path(thresholds.prompts)] if thresholds.prompts else []
    own = [prompt for path in (*files, *([prompts] if prompts else [])) for prompt in read_prompts(path)]
    is_priced = spec is not None and spec.costs.machine_hour is not None
    costs = spec.costs if spec is not None and is_priced else _costs_of_ledger(settings)
    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    return GateOptions(thresholds, costs, tuple(own), scratch_dir=settings.cache_dir)


def _read_spec(path: Path) -> Spec:
    """Read a spec for its gates: its model need not be on this host, its prompts lie beside it."""
    from enginehouse_builders.spec.loading import parse_spec  # noqa: PLC0415

    try:
        spec = parse_spec(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not text (UTF-8) at byte {error.start}.") from error
    if spec.gates.prompts is None:
        return spec
    prompts = str(path.absolute().parent / Path(spec.gates.prompts).expanduser())
    return spec.model_copy(update={"gates": spec.gates.model_copy(update={"prompts": prompts})})


def _costs_of_ledger(settings: Settings) -> Costs:
    """What the price book in force says of the machine; unknown where nothing is accounted or no book says it."""
    from enginehouse_builders.spec.model import Costs  # noqa: PLC0415

    if settings.accounting == "off":
        return Costs()
    with open_ledger(None) as ledger:
        in_force = ledger.price_list().in_force(time.time_ns())
    if in_force is None or in_force[1].machine_per_hour is None:
        return Costs()
    return Costs(machine_hour=in_force[1].machine_per_hour, currency=in_force[1].currency)


def _print(record: GateRecord, path: Path, elapsed_s: float) -> None:
    against = "no reference" if record.against_build_id is None else f"against {record.against_build_id[:19]}"
    stdout.print(f"{record.model_name} {record.build_id[:19]}, {against}, on {record.host_kind}", markup=False)
    table = Table("gate", "", "what was found")
    for result in record.results:
        table.add_row(result.gate, _MARKS[result.status], _found(result))
    stdout.print(table)
    verdict = "passed" if record.passed else f"not passed: {record.why_not.partition(':')[0]}"
    stdout.print(f"{verdict} ({elapsed_s:.0f} s)\nrecord {record.number}: {path}", markup=False)


def _found(result: GateResult) -> str:
    names = _SHOWN.get(result.gate, ())
    lines = [result.reason]
    for prefix in ("", "own_"):
        shown = [_number(name, value) for name in names if (value := result.numbers.get(prefix + name)) is not None]
        if shown:
            lines.append(f"{prefix.replace('_', ': ')}{', '.join(shown)}")
    return "\n".join(lines)


def _number(name: str, value: object) -> str:
    words = name.replace("_", " ")
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{words.removesuffix(' bytes')} {value / 1e6:,.0f} MB"
    if isinstance(value, (float, str)):
        rounded = Decimal(f"{Decimal(str(value)):.4g}")
        return f"{words} {rounded:f}" if abs(rounded) < _MAX_PLAIN else f"{words} {rounded}"
    return f"{words} {value}"
