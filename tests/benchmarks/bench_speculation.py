"""What prompt-lookup drafts are worth: tokens per second with over without, in alternating pairs; medians.

    python tests/benchmarks/bench_speculation.py [--plot docs/speculation.svg]

``copy_1`` and ``copy_8`` are on prompts whose answers copy from them, one and eight sequences at a time;
``nothing_to_copy`` on prompts that have nothing to copy, one at a time. ``greedy_identical`` says whether every answer
was the same token for token with drafts and without. The build has a float32 KV cache, so that a step of several
tokens computes what single steps do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from speculation_prompts import COPYING, NOTHING_TO_COPY
from tests.support.engines import generate_all, load_runner, make_request, running_engine

from enginehouse_backends.tokenization.chat import render_chat
from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_builders.demo_model import fetch_demo_model
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginehouse_backends.engine.engine import Engine
    from enginehouse_backends.engine.request import SequenceOutput

NUM_TOKENS = 96
BATCH_SIZES = (1, 2, 4, 8)


class Measurement:
    """Pairs of rates and the acceptance of one set of prompts at one batch size."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.num_drafts = 0
        self.num_accepted = 0
        self.num_equal = 0
        self.num_answers = 0

    @property
    def ratio(self) -> float:
        """The median speed-up."""
        return median(self.ratios)

    @property
    def acceptance(self) -> float:
        """Accepted over proposed drafts."""
        return self.num_accepted / self.num_drafts if self.num_drafts else 0.0


def main() -> None:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="draw the speed-up over the batch size as SVG")
    options = parser.parse_args()
    settings = load_settings()
    build = BuildOptions(model=fetch_demo_model(settings.cache_dir), kv_precision="f32")
    build_dir = build_engine(build, settings.store_dir).build_dir
    tokenizer = load_tokenizer(build_dir)

    def encode(prompt: str) -> list[int]:
        text = render_chat(tokenizer, [{"role": "user", "content": prompt}])
        return tokenizer.encode(text, add_special_tokens=False)

    copying, others = [encode(prompt) for prompt in COPYING], [encode(prompt) for prompt in NOTHING_TO_COPY]
    with running_engine(load_runner(build_dir), build_dir, max_num_tokens=256) as engine:
        by_batch = {size: measure(engine, copying, size) for size in BATCH_SIZES}
        nothing = measure(engine, others, 1)
    for size, measurement in by_batch.items():
        line = f"copying, {size} at a time: {measurement.ratio:.2f}x, acceptance {measurement.acceptance:.2f}"
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"nothing to copy: {nothing.ratio:.2f}x, acceptance {nothing.acceptance:.2f}\n")
    if options.plot is not None:
        options.plot.write_text(draw(by_batch))
    every = [*by_batch.values(), nothing]
    result = {
        "copy_1": round(by_batch[1].ratio, 3),
        "copy_8": round(by_batch[8].ratio, 3),
        "nothing_to_copy": round(nothing.ratio, 3),
        "greedy_identical": all(each.num_equal == each.num_answers for each in every),
    }
    sys.stdout.write(json.dumps(result) + "\n")


def measure(engine: Engine, prompts: Sequence[list[int]], batch_size: int) -> Measurement:
    """Generate groups of prompts with and without drafts, in turn, and compare."""
    measurement = Measurement()
    run(engine, prompts[:batch_size], speculate=False)  # its prompts are cached for both afterwards
    for start in range(0, len(prompts), batch_size):
        group = [prompts[(start + offset) % len(prompts)] for offset in range(batch_size)]
        run(engine, group, speculate=False, num_tokens=1)
        plain_s, plain = run(engine, group, speculate=False)
        drafted_s, drafted = run(engine, group, speculate=True)
        measurement.ratios.append(plain_s / drafted_s)
        for one, other in zip(plain, drafted, strict=True):
            measurement.num_answers += 1
            measurement.num_equal += one.token_ids == other.token_ids
            measurement.num_drafts += other.stats.num_draft_tokens
            measurement.num_accepted += other.stats.num_accepted_draft_tokens
    return measurement


def run(
    engine: Engine, prompts: Sequence[list[int]], *, speculate: bool, num_tokens: int = NUM_TOKENS
) -> tuple[float, list[SequenceOutput]]:
    """Generate all prompts together; return the seconds it took and the outputs."""
    started_s = time.perf_counter()
    requests = [
        make_request(f"{started_s}/{index}", prompt, num_tokens, speculate_ngram=speculate)
        for index, prompt in enumerate(prompts)
    ]
    outputs = [output for (output,) in generate_all(engine, requests)]
    return time.perf_counter() - started_s, outputs


def draw(measured: dict[int, Measurement]) -> str:
    """Return a bar chart of speed-up and acceptance over batch size."""
    width, height, base = 420, 285, 210
    scale = 150 / max(2.0, *(each.ratio for each in measured.values()))
    bars = []
    for index, (size, each) in enumerate(measured.items()):
        ratio, accepted = each.ratio, f"accepted {each.acceptance:.0%}"
        x, y = 60 + 85 * index, base - ratio * scale
        bars += [
            f'<rect x="{x}" y="{y:.1f}" width="50" height="{ratio * scale:.1f}" fill="#4878a8"/>',
            f'<text x="{x + 25}" y="{y - 6:.1f}" text-anchor="middle">{ratio:.2f}</text>',
            f'<text x="{x + 25}" y="{base + 18}" text-anchor="middle">{size}</text>',
            f'<text x="{x + 25}" y="{base + 36}" text-anchor="middle" font-size="11" fill="#666">{accepted}</text>',
        ]
    one = base - scale
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="13">',
            '<g font-family="sans-serif">',
            f'<text x="{width / 2}" y="22" text-anchor="middle">Speed-up of prompt lookup where answers copy</text>',
            *bars,
            f'<line x1="45" x2="{width - 15}" y1="{one:.1f}" y2="{one:.1f}" stroke="#999" stroke-dasharray="4"/>',
            f'<line x1="45" x2="{width - 15}" y1="{base}" y2="{base}" stroke="#333"/>',
            f'<text x="{width / 2}" y="{base + 60}" text-anchor="middle">sequences at a time</text>',
            "</g>",
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    main()
