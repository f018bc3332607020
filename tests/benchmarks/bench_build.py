"""How long a build takes, a cache hit and a plan, and how much memory a build needs at most.

    python tests/benchmarks/bench_build.py [--model FILE] [--weights PRECISION]

Each is the command as a user runs it, in a process of its own with a state folder of its own. ``peak_ratio`` is the
peak resident memory of the build over what it may take: three times the bytes of the build's weights, or 1.5 GB where
that is more. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_contract.manifest import WEIGHTS_FILE
from enginehouse_contract.settings import load_settings

MAX_PEAK_BYTES: Final = 1.5e9
MAX_RATIO: Final = 3
NUM_REPEATS: Final = 5
COMMAND: Final = (sys.executable, "-m", "enginehouse_cli")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct, Q4_1")
    parser.add_argument("--weights", default="as_in_file")
    arguments = parser.parse_args()
    model = arguments.model or fetch_demo_model(load_settings().cache_dir)
    with tempfile.TemporaryDirectory() as home:
        build = ("build", str(model), "--weights", arguments.weights, "--json")
        build_s, peak_bytes, output = timed(home, *build)
        weights_bytes = (Path(json.loads(output)["path"]) / WEIGHTS_FILE).stat().st_size
        hits_s = [timed(home, *build)[0] for _ in range(NUM_REPEATS)]
        timed(home, "plan", str(model), "--json")  # measures this CPU once
        plans_s = [timed(home, "plan", str(model), "--json")[0] for _ in range(NUM_REPEATS)]
    sys.stdout.write(f"weights {weights_bytes / 1e6:.0f} MB, peak of the build {peak_bytes / 1e6:.0f} MB\n")
    sys.stdout.write(f"cache hits {', '.join(f'{seconds:.2f}' for seconds in hits_s)} s\n")
    result = {
        "build_s": round(build_s, 2),
        "cache_hit_s": round(median(hits_s), 3),
        "plan_s": round(median(plans_s), 3),
        "peak_ratio": round(peak_bytes / max(MAX_RATIO * weights_bytes, MAX_PEAK_BYTES), 3),
    }
    sys.stdout.write(json.dumps(result) + "\n")


def timed(home: str, *arguments: str) -> tuple[float, int, str]:
    """Run one command; return its seconds, its peak resident bytes and what it printed."""
    environ = {**os.environ, "ENGINEHOUSE_HOME": home}
    started_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(  # noqa: S603 - our own command
            [*COMMAND, *arguments], stdout=output, stderr=subprocess.DEVNULL, env=environ
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started_s
        output.seek(0)
        text = output.read()
    if child.returncode not in {0, 1} or not text:  # a plan that warns of an error ends with 1
        raise SystemExit(f"{' '.join(arguments)} ended with {child.returncode}")
    return seconds, usage.ru_maxrss * 1024, text


if __name__ == "__main__":
    main()
