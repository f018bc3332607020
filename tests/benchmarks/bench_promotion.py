"""Promotions and rollbacks under a steady load: what fails, what mixes, what the books lose, how long a flip takes.

    python tests/benchmarks/bench_promotion.py [--changes 50]

Short requests at 20/s beside 8 long streams on the real CPU engine, over two builds that answer differently. Each round
promotes the second build, keeping the first loaded, and rolls back. The last line is one JSON object: ``flip_s`` from
the end of a load until new requests were seen on the new release, ``rollback_s`` the same for a release that was still
loaded; the worst of all rounds. ``lost_usage`` counts answered requests without exactly one record in the ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.metrics import resident_kib
from tests.support.steady_load import SteadyLoad, learn_answers

from enginehouse_backends.accounting.setup import open_ledger
from enginehouse_backends.accounting.views import records
from enginehouse_backends.server.supervisor import read_state
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_contract.settings import Settings, load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from enginehouse_backends.server.supervisor import ServerState

# The queue is long: a machine that cannot keep up while it compiles an engine is slow here, not a failed promotion.
PARAMETERS = ("kv_cache_memory_budget_bytes=400000000", "stats_check_period_ms=100", "max_queue_size=4096")
MAX_SECONDS = 540.0


def main() -> None:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=50, help="promotions and rollbacks together")
    num_changes = parser.parse_args().changes
    begun_s = time.perf_counter()
    machine = load_settings()
    model = fetch_demo_model(machine.cache_dir)
    builds = [
        build_engine(BuildOptions(model=model, weight_precision=precision), machine.store_dir)
        for precision in ("as_in_file", "int4")
    ]
    build_ids = [build.manifest.build_id for build in builds]
    with tempfile.TemporaryDirectory(prefix="enginehouse-") as folder:
        settings = Settings(home=Path(folder, "home"))
        with serving(settings, builds[0].build_dir) as state:
            second = str(builds[1].build_dir)
            enginehouse(settings, "promote", second, "--stage", "staging")
            expected = learn_answers(state.grpc_url, ["ensemble-r1", "ensemble-r2"], build_ids)
            differing = sum(expected[build_ids[0], prompt] != text for (_, prompt), text in expected.items())
            say(f"the builds answer {differing} of {len(expected) // 2} prompts differently")
            enginehouse(settings, "promote", "r1", "--stage", "staging")
            with SteadyLoad(state.grpc_url, expected) as load:
                time.sleep(10.0)
                alone_kib = resident_kib(state.pid)
                rows = change_on(settings, load, num_changes, begun_s)
                after_kib = resident_kib(state.pid)
        lost = count_lost(settings, load)
    report_latencies(load, rows)
    say(f"memory {alone_kib >> 10} MiB with one release before, {after_kib >> 10} MiB after")
    for reason, count in Counter(answer.error[:120] for answer in load.failed).most_common(5):
        say(f"  {count} failed: {reason}")
    for answer in load.mixed[:3]:
        say(f"  mixed: {answer}")
    flips = [row["ready_to_switched_s"] for row in rows if row["action"] == "promote"]
    rollbacks = [row["ready_to_switched_s"] for row in rows if row["action"] == "rollback"]
    say(f"median flip {median(flips):.3f} s, rollback {median(rollbacks):.3f} s; {len(load.answers)} requests")
    result = {
        "promotions": len(rows),
        "failed": len(load.failed),
        "mixed": len(load.mixed),
        "lost_usage": lost,
        "flip_s": round(max(flips), 3),
        "rollback_s": round(max(rollbacks), 3),
    }
    sys.stdout.write(json.dumps(result) + "\n")


def change_on(settings: Settings, load: SteadyLoad, num_changes: int, begun_s: float) -> list[dict[str, Any]]:
    """Promote and roll back in turn; stop early, and say so, when the time is up."""
    rows: list[dict[str, Any]] = []
    while len(rows) < num_changes:
        if time.perf_counter() - begun_s > MAX_SECONDS and len(rows) % 2 == 0:
            say(f"stopped after {len(rows)} changes: {MAX_SECONDS:.0f} s are over")
            break
        is_promotion = len(rows) % 2 == 0
        command = ("promote", "r2", "--override", "benchmark", "--keep-loaded") if is_promotion else ("rollback",)
        started_s = time.perf_counter()
        row = enginehouse(settings, *command)
        rows.append({**row, "started_s": started_s, "ended_s": time.perf_counter()})
        say(
            f"{len(rows):3} {row['action']:9} to {row['release']}: load {row['load_s'] or 0:.1f} s, switched "
            f"{row['ready_to_switched_s']:.3f} s after it, drain and unload {row['drain_s'] or 0:.1f} s, "
            f"{len(load.failed)} failed, {len(load.mixed)} mixed"
        )
    return rows


def report_latencies(load: SteadyLoad, rows: list[dict[str, Any]]) -> None:
    """Print how the short requests fared while nothing changed, and during the changes."""
    during = [s for row in rows for s in load.short_latencies_s(row["started_s"], row["ended_s"])]
    before = load.short_latencies_s(0.0, rows[0]["started_s"])
    if before and during:
        worst = sorted(during)[int(0.99 * len(during))]
        say(
            f"short requests: median {1000 * median(before):.0f} ms before the first change, "
            f"{1000 * median(during):.0f} ms during changes (99% under {1000 * worst:.0f} ms)"
        )


def count_lost(settings: Settings, load: SteadyLoad) -> int | None:
    """Return how many answered requests have not exactly one record; None where nothing is accounted."""
    if load_settings().accounting != "on":
        return None
    with open_ledger(settings) as ledger:
        found = Counter(record.key.request_id for record in records(ledger.database, limit=10**9))
    return sum(found[answer.request_id] != 1 for answer in load.answers if not answer.error)


@contextmanager
def serving(settings: Settings, build_dir: Path) -> Iterator[ServerState]:
    """Run `enginehouse serve` until the end of the block."""
    flags = [flag for parameter in PARAMETERS for flag in ("--parameter", parameter)]
    ports = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0")
    command = [str(Path(sys.executable).with_name("enginehouse")), "serve", str(build_dir), *ports, *flags]
    process = subprocess.Popen(  # noqa: S603 - our own command
        command, env=environment(settings), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        while (state := read_state(settings.home)) is None:
            if process.poll() is not None:
                assert process.stderr is not None, "it was asked for"
                raise SystemExit(process.stderr.read().decode())
            time.sleep(0.1)
        yield state
    finally:
        process.terminate()
        process.wait()


def enginehouse(settings: Settings, *arguments: str) -> dict[str, Any]:
    """Run one command as a user does and return its JSON; end with its words when it fails."""
    command = [str(Path(sys.executable).with_name("enginehouse")), *arguments, "--json"]
    done = subprocess.run(  # noqa: S603 - our own command
        command, env=environment(settings), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip()}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def environment(settings: Settings) -> Mapping[str, str]:
    """The variables of a command on this home."""
    return {**os.environ, **settings.environ()}


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
