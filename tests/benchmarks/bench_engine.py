"""Our engine beside OpenVINO GenAI's continuous batching and llama.cpp, in one run, alternating, medians.

    python tests/benchmarks/bench_engine.py [--model MODEL.gguf] [--weight-precision int8]

All compute with OpenVINO's default arithmetic for the host (our ``performance`` mode), the same build, KV precision,
prompts (random token ids) and token counts; sampling is greedy. The rates of our ``accuracy`` mode, in which a
sequence's tokens do not depend on its batch, are printed beside. llama.cpp runs the GGUF file where it is installed.

KV waste is allocated minus live slots, over allocated, before each step of a mixed-length load, averaged over steps.
The last line is one JSON object; its ratios are ours over theirs, and ``triton_ratio_32`` the rate through the server
over the engine's own, both in accuracy mode, in which the server serves by default.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from bench_frontdoor import served_rate_ratio
from engine_systems import Enginehouse, LlamaCpp, OpenVinoGenAI, has_llama_cpp, load_enginehouse

from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from engine_systems import Prompts, System

    from enginehouse_backends.engine.runner import OpenVinoRunner
    from enginehouse_backends.engine.step import StepLogits, StepPlan

BATCH_SIZES = (1, 8, 32)
LLAMA_CPP = "llama.cpp"  # slow beside the others, so it runs at the largest batch size only
NUM_PROMPT_TOKENS = 32
NUM_NEW_TOKENS = 25
NUM_ROUNDS = 4
NUM_WASTE_REQUESTS = 24
MAX_WASTE_PROMPT_TOKENS = 1400
MAX_WASTE_NEW_TOKENS = 100

Rates = dict[str, dict[str, list[float]]]  # measure -> system -> tokens per second, one for each round


def main() -> None:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file (default: the demo's model)")
    parser.add_argument("--weight-precision", default="as_in_file", help="of the build (default: as_in_file)")
    options = parser.parse_args()
    settings = load_settings()
    model = options.model or fetch_demo_model(settings.cache_dir)
    build = build_engine(BuildOptions(model=model, weight_precision=options.weight_precision), settings.store_dir)
    build_dir, kv_precision = build.build_dir, build.manifest.kv_precision
    ours = load_enginehouse(build_dir, kv_precision, "performance")
    systems: dict[str, System] = {
        "enginehouse": ours,
        "openvino-genai": OpenVinoGenAI(build_dir, kv_precision),
        "enginehouse, accuracy mode": load_enginehouse(build_dir, kv_precision, "accuracy"),
    }
    if has_llama_cpp():
        systems[LLAMA_CPP] = LlamaCpp(model, os.cpu_count() or 1)
    rates = measure_rates(systems)
    result: dict[str, float | None] = {
        f"decode_ratio_{size}": ratio(rates[f"decode at {size}"], "openvino-genai") for size in BATCH_SIZES
    }
    result["prefill_ratio"] = ratio(rates["prefill"], "openvino-genai")
    result["llama_cpp_ratio_32"] = ratio(rates["decode at 32"], LLAMA_CPP) if LLAMA_CPP in systems else None
    result["kv_waste"] = round(measure_kv_waste(ours), 4)
    systems.clear()
    result["triton_ratio_32"] = round(served_rate_ratio(build_dir), 3)
    say(json.dumps(result))


def measure_rates(systems: dict[str, System]) -> Rates:
    """Measure decode rates at each batch size and the prefill rate at the largest, round by round, systems in turn."""
    rates: Rates = {}
    random = np.random.default_rng(0)
    for size in BATCH_SIZES:
        in_turn = {name: system for name, system in systems.items() if name != LLAMA_CPP or size == max(BATCH_SIZES)}
        for round_index in range(NUM_ROUNDS + 1):
            prompts = random.integers(10, 40_000, (size, NUM_PROMPT_TOKENS)).tolist()
            for name, system in rotated(in_turn, round_index):
                times = system.generate(prompts, NUM_NEW_TOKENS)
                if round_index == 0:
                    continue  # a system's first batch of a size also plans its memory
                add(rates, f"decode at {size}", name, size * (NUM_NEW_TOKENS - 1) / times.decode_s)
                if size == max(BATCH_SIZES):
                    add(rates, "prefill", name, size * NUM_PROMPT_TOKENS / times.prefill_s)
        say(report(rates, f"decode at {size}"))
    say(report(rates, "prefill"))
    return rates


def measure_kv_waste(ours: Enginehouse) -> float:
    """Serve requests of mixed lengths; return the mean share of allocated slots that hold no token's KV."""
    random = np.random.default_rng(1)
    prompts: Prompts = [
        random.integers(10, 40_000, length).tolist()
        for length in random.integers(8, MAX_WASTE_PROMPT_TOKENS, NUM_WASTE_REQUESTS)
    ]
    num_new_tokens = random.integers(8, MAX_WASTE_NEW_TOKENS, NUM_WASTE_REQUESTS).tolist()
    probe = WasteProbe(ours)
    ours.engine._runner = probe
    ours.generate_all(prompts, num_new_tokens)
    ours.engine._runner = probe.runner
    say(f"KV waste over {len(probe.shares)} steps: mean {np.mean(probe.shares):.1%}, max {max(probe.shares):.1%}")
    return float(np.mean(probe.shares))


class WasteProbe:
    """Stands before a runner and looks at the block pool as each step begins to compute."""

    def __init__(self, ours: Enginehouse) -> None:
        self.runner: OpenVinoRunner = ours.engine._runner
        self.shares: list[float] = []
        self._pool = ours.engine.pool
        self._scheduler = ours.engine._scheduler

    def run(self, plan: StepPlan) -> StepLogits:
        """Note the share of allocated slots that stay empty, then compute."""
        num_allocated = self._pool.num_used_blocks * self._pool.tokens_per_block
        num_live = plan.num_tokens + sum(sequence.num_computed_tokens for sequence in self._scheduler._running)
        self.shares.append((num_allocated - num_live) / num_allocated)
        return self.runner.run(plan)


def rotated(systems: dict[str, System], offset: int) -> list[tuple[str, System]]:
    """The systems in turn, beginning with another one each time."""
    items = list(systems.items())
    offset %= len(items)
    return items[offset:] + items[:offset]


def add(rates: Rates, measure: str, system: str, rate: float) -> None:
    """Append one round's rate."""
    rates.setdefault(measure, {}).setdefault(system, []).append(rate)


def ratio(rates: dict[str, list[float]], other: str) -> float:
    """Our median rate over theirs."""
    return round(median(rates["enginehouse"]) / median(rates[other]), 3)


def report(rates: Rates, measure: str) -> str:
    """One line of medians."""
    medians = (f"{name} {median(values):.0f} tokens/s" for name, values in sorted(rates[measure].items()))
    return f"{measure}: {'; '.join(medians)}"


def say(line: str) -> None:
    """Print a line now."""
    print(line, flush=True)  # noqa: T201 - a benchmark's output is its result


if __name__ == "__main__":
    main()
