"""`enginehouse bench`: load on a server, measured; and two measurements compared."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Optional

import typer

from enginehouse_cli.console import EXIT_FAILED, print_json, progress_bar, stderr, stdout
from enginehouse_cli.options import DEFAULT_MODEL, JsonFlag, ModelOption, UrlOption, find_server

if TYPE_CHECKING:
    from enginehouse_builders.bench.run import BenchRun
    from enginehouse_builders.bench.workload import Workload

app = typer.Typer(add_completion=False)

DEFAULT_CONCURRENCY: Final = 4
DEFAULT_NUM_REQUESTS: Final = 40
_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")
_NO_END_TOKEN: Final = {"extra_inputs": {"end_id": -1}}  # answers have the length that was asked for

ResultArgument = Annotated[Path, typer.Argument(help="A result that bench wrote with --output.")]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    url: UrlOption = None,
    model: ModelOption = DEFAULT_MODEL,
    rate: Annotated[Optional[float], typer.Option("--rate", help="Open loop: requests per second.")] = None,
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="Of arrivals: 0 is regular, 1 Poisson, more comes in bursts.")
    ] = 1.0,
    concurrency: Annotated[
        Optional[int], typer.Option("--concurrency", help="Closed loop: requests in flight. (default: 4)")
    ] = None,
    trace: Annotated[
        Optional[Path],
        typer.Option("--trace", help="JSON lines: at, prompt or input_tokens, max_tokens, tenant, priority."),
    ] = None,
    num_requests: Annotated[
        Optional[int], typer.Option("--num-requests", help="Measured requests. (default: 40, or the trace's)")
    ] = None,
    duration: Annotated[Optional[float], typer.Option("--duration", help="Measured seconds.")] = None,
    warmup: Annotated[
        Optional[int],
        typer.Option("--warmup", help="First requests, not measured. (default: as many as are in flight)"),
    ] = None,
    input_tokens: Annotated[
        str, typer.Option("--input-tokens", help="128, uniform:16,256, lognormal:MEDIAN,SIGMA or file:PATH.")
    ] = "128",
    output_tokens: Annotated[str, typer.Option("--output-tokens", help="As --input-tokens.")] = "64",
    shared_prefix: Annotated[
        int, typer.Option("--shared-prefix", help="So many tokens of each prompt are shared.")
    ] = 0,
    num_prefixes: Annotated[int, typer.Option("--num-prefixes", help="Number of different shared prefixes.")] = 1,
    cancel_share: Annotated[
        float, typer.Option("--cancel-share", help="Part of the requests that is cancelled on the way.")
    ] = 0.0,
    tenant: Annotated[Optional[str], typer.Option("--tenant", help="Who asks.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed asks the same.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Time limit of each request, in seconds.")] = 600.0,
    slo: Annotated[Optional[str], typer.Option("--slo", help="For goodput: ttft=200ms,itl=50ms (tpot, e2e).")] = None,
    machine_hour: Annotated[
        Optional[str], typer.Option("--machine-hour", help="Price of an hour of the server's machine, such as 0.40.")
    ] = None,
    currency: Annotated[str, typer.Option("--currency", help="Of --machine-hour.")] = "USD",
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="Write the result here, as JSON.")] = None,
    report: Annotated[Optional[Path], typer.Option("--report", help="Write an HTML page with plots here.")] = None,
    *,
    stop_at_end: Annotated[
        bool, typer.Option("--stop-at-end", help="Let the model end its answers; else all have their full length.")
    ] = False,
    no_requests: Annotated[
        bool, typer.Option("--no-requests", help="Leave single requests out of the JSON; compare needs them.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Send load to a running server and measure what a user would see.

    Latencies count from when a request should have been sent, so that a full server is not flattered.
    """
    if context.invoked_subcommand is not None:
        return
    from enginehouse_builders.bench.lengths import parse_lengths  # noqa: PLC0415 - commands import what they use
    from enginehouse_builders.bench.run import BenchRun  # noqa: PLC0415
    from enginehouse_builders.bench.slo import Slo, parse_slo  # noqa: PLC0415
    from enginehouse_builders.bench.trace import read_trace  # noqa: PLC0415
    from enginehouse_builders.bench.workload import Workload  # noqa: PLC0415
    from enginehouse_cli.bench_driver import run_load  # noqa: PLC0415

    lines = read_trace(trace) if trace else []
    is_timed = bool(lines) and lines[0].at_s is not None and rate is None and concurrency is None
    if concurrency is None and rate is None and not is_timed:
        concurrency = DEFAULT_CONCURRENCY
    if num_requests is None and duration is None and not lines:
        num_requests = DEFAULT_NUM_REQUESTS
    if warmup is None:
        warmup = 0 if is_timed else concurrency or DEFAULT_CONCURRENCY
    workload = Workload(
        parse_lengths(input_tokens, "input_tokens"),
        parse_lengths(output_tokens, "output_tokens"),
        concurrency=concurrency,
        rate_per_s=rate,
        burstiness=burstiness,
        trace=lines,
        num_requests=num_requests,
        duration_s=duration,
        num_warmup_requests=warmup,
        num_shared_prefix_tokens=shared_prefix,
        num_prefixes=num_prefixes,
        cancel_share=cancel_share,
        tenant=tenant,
        seed=seed,
    )
    objectives = parse_slo(slo) if slo else Slo()
    _check_before_the_run(machine_hour, output, report)
    address = find_server(url)
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with progress_bar("bench") as progress:
        records, load = asyncio.run(
            run_load(
                address,
                workload,
                model=model,
                options={} if stop_at_end else _NO_END_TOKEN,
                timeout_s=timeout,
                progress=progress,
            )
        )
    run = BenchRun(
        started_at,
        {**_parameters(workload, trace), "model": model, "stop_at_end": stop_at_end, "timeout_s": timeout, "slo": slo},
        _environment(address),
        load,
        records,
        loop=workload.loop,
        duration_s=duration,
        slo=objectives,
        machine_hour=machine_hour,
        currency=currency,
    )
    _deliver(run, output, report, with_requests=not no_requests, as_json=as_json)


def _deliver(run: BenchRun, output: Path | None, page: Path | None, *, with_requests: bool, as_json: bool) -> None:
    """Write and print what was measured; exit with an error where every request failed."""
    from enginehouse_builders.bench.figures import compute_figures  # noqa: PLC0415
    from enginehouse_builders.bench.report import render_report  # noqa: PLC0415
    from enginehouse_builders.bench.run import run_to_json, write_run  # noqa: PLC0415
    from enginehouse_cli.bench_text import figures_text  # noqa: PLC0415

    figures = compute_figures(run)
    if output:
        write_run(output, run, figures.to_json(), with_requests=with_requests)
    if page:
        page.write_text(render_report(run, figures), encoding="utf-8")
    if as_json:
        print_json(run_to_json(run, figures.to_json(), with_requests=False))
    else:
        stdout.print(figures_text(figures), markup=False)
        for path in (output, page):
            if path:
                stderr.print(f"written: {path}", markup=False)
    if figures.num_requests and figures.num_failed == figures.num_requests:
        raise typer.Exit(EXIT_FAILED)


@app.command("compare")
def compare(a: ResultArgument, b: ResultArgument, *, as_json: JsonFlag = False) -> None:
    """Compare result B with result A: ratios with confidence intervals, and whether they are more than noise."""
    from enginehouse_builders.bench.compare import compare_runs  # noqa: PLC0415
    from enginehouse_builders.bench.run import read_run  # noqa: PLC0415
    from enginehouse_cli.bench_text import comparison_text  # noqa: PLC0415

    comparison = compare_runs(read_run(a), read_run(b))
    if as_json:
        print_json(comparison.to_json())
    else:
        stdout.print(comparison_text(comparison), markup=False)


@app.command("report")
def report(result: ResultArgument, page: Annotated[Path, typer.Argument(help="The HTML page to write.")]) -> None:
    """Write the HTML page of a result."""
    from enginehouse_builders.bench.figures import compute_figures  # noqa: PLC0415
    from enginehouse_builders.bench.report import render_report  # noqa: PLC0415
    from enginehouse_builders.bench.run import read_run  # noqa: PLC0415

    run = read_run(result)
    page.write_text(render_report(run, compute_figures(run)), encoding="utf-8")
    stderr.print(f"written: {page}", markup=False)


def _check_before_the_run(machine_hour: str | None, *paths: Path | None) -> None:
    """Refuse a price that is none, and files that cannot be written, before minutes are spent."""
    from enginehouse_contract.money import parse_price  # noqa: PLC0415

    if machine_hour is not None:
        parse_price(machine_hour, "machine_hour")
    for path in paths:
        if path is not None:
            with path.open("a", encoding="utf-8"):
                pass


def _parameters(workload: Workload, trace: Path | None) -> dict[str, Any]:
    return {
        "loop": workload.loop,
        "rate_per_s": workload.rate_per_s,
        "burstiness": workload.burstiness if workload.rate_per_s is not None else None,
        "concurrency": workload.concurrency,
        "trace": str(trace) if trace else None,
        "num_requests": workload.num_measured_requests,
        "duration_s": workload.duration_s,
        "num_warmup_requests": workload.num_warmup_requests,
        "input_tokens": workload.input_tokens.text,
        "output_tokens": workload.output_tokens.text,
        "num_shared_prefix_tokens": workload.num_shared_prefix_tokens,
        "num_prefixes": workload.num_prefixes,
        "cancel_share": workload.cancel_share,
        "tenant": workload.tenant,
        "seed": workload.seed,
    }


def _environment(address: str) -> dict[str, Any]:
    """Return what a reader needs to know about the generator's machine and the way to the server."""
    import platform  # noqa: PLC0415 - as above
    from importlib.metadata import version  # noqa: PLC0415

    from enginehouse_builders.gates.host import describe_host  # noqa: PLC0415

    host = describe_host()
    return {
        "cpu": host.cpu_name,
        "num_cpus": host.num_cores,
        "gpus": [gpu.name for gpu in host.gpus],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "enginehouse": version("enginehouse"),
        "tritonclient": version("tritonclient"),
        "protocol": "http" if address.startswith("http") else "grpc",
        "server": address,
        "is_server_local": address.partition("://")[2].startswith(_LOCAL_HOSTS) or address.startswith(_LOCAL_HOSTS),
    }
