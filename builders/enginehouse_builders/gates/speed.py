"""The speed gate: one fixed trace over the build and its reference, in alternating rounds.

A machine's speed drifts with whatever else it does, so builds are compared within pairs of rounds next to each other
(A B, B A, A B), and the median of the pairs' ratios decides. Every round's prompts begin with words of their own, so
that no round finds the prefix of another in the cache.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from enginehouse_builders.gates.record import GateResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from enginehouse_builders.gates.record import Value
    from enginehouse_builders.gates.services import EngineService, PromptEncoder
    from enginehouse_builders.spec.model import SpeedGate

    OpenService = Callable[[], EngineService]

_MS: Final = 1e3


@dataclass(frozen=True, slots=True)
class Trace:
    """What is asked in every round: how many requests, of how many tokens, how many at a time."""

    num_requests: int = 8
    num_prompt_tokens: int = 48
    num_output_tokens: int = 32
    concurrency: int = 4
    num_pairs: int = 3


@dataclass(frozen=True, slots=True)
class Round:
    """One round's measurements. Times are medians over its requests."""

    elapsed_s: float
    num_output_tokens: int
    ttft_s: float
    itl_s: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests per second."""
        return self.num_output_tokens / self.elapsed_s


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """All rounds of a build, and of its reference beside it."""

    build: tuple[Round, ...]
    reference: tuple[Round, ...] = ()


def measure(
    open_build: OpenService,
    open_reference: OpenService | None,
    encoder: PromptEncoder,
    texts: Sequence[str],
    trace: Trace,
) -> SpeedRun:
    """Run the trace over both builds; the first round of each is not counted."""
    prompts = _prompts(encoder, texts, trace)
    services = [open_build] if open_reference is None else [open_build, open_reference]
    rounds: list[list[Round]] = [[] for _ in services]
    for open_service in services:
        _run_round(open_service(), prompts(), trace)
    for pair in range(trace.num_pairs):
        order = list(range(len(services)))
        for index in order if pair % 2 == 0 else reversed(order):
            service = services[index]()
            for _ in service.stream(prompts()[0], 2):  # wakes what was just loaded
                pass
            rounds[index].append(_run_round(service, prompts(), trace))
    return SpeedRun(tuple(rounds[0]), tuple(rounds[1]) if open_reference is not None else ())


def judge(run: SpeedRun, limits: SpeedGate) -> GateResult:
    """Hold a run against the thresholds."""
    ttft_ms = median(one.ttft_s for one in run.build) * _MS
    itl_ms = median(one.itl_s for one in run.build) * _MS
    numbers: dict[str, Value] = {
        "tokens_per_s": median(one.tokens_per_s for one in run.build),
        "ttft_ms": ttft_ms,
        "itl_ms": itl_ms,
        "num_rounds": len(run.build),
    }
    failures = []
    for name, value, limit in (("ttft_ms", ttft_ms, limits.max_ttft_ms), ("itl_ms", itl_ms, limits.max_itl_ms)):
        if limit is not None and value > limit:
            failures.append(f"{name} is {value:.1f}, at most {limit:g} may be")
    if run.reference:
        throughput = _median_ratio(run, lambda one: one.tokens_per_s)
        ttft, itl = _median_ratio(run, lambda one: one.ttft_s), _median_ratio(run, lambda one: one.itl_s)
        numbers |= {
            "throughput_ratio": throughput,
            "ttft_ratio": ttft,
            "itl_ratio": itl,
            "reference_tokens_per_s": median(one.tokens_per_s for one in run.reference),
            "reference_ttft_ms": median(one.ttft_s for one in run.reference) * _MS,
            "reference_itl_ms": median(one.itl_s for one in run.reference) * _MS,
        }
        if throughput < limits.min_throughput_ratio:
            failures.append(
                f"throughput is {throughput:.2f} of the reference's, at least {limits.min_throughput_ratio:g} must be"
            )
        for name, ratio, limit in (("TTFT", ttft, limits.max_ttft_ratio), ("ITL", itl, limits.max_itl_ratio)):
            if ratio > limit:
                failures.append(f"{name} is {ratio:.2f} of the reference's, at most {limit:g} may be")
    passed = "as fast as it must be beside the reference" if run.reference else "no reference: only limits in ms count"
    reason = "; ".join(failures) or passed
    return GateResult("speed", "failed" if failures else "passed", reason, numbers, dict(limits.model_dump()))


def _median_ratio(run: SpeedRun, quantity: Callable[[Round], float]) -> float:
    return median(quantity(ours) / quantity(theirs) for ours, theirs in zip(run.build, run.reference, strict=True))


def _prompts(encoder: PromptEncoder, texts: Sequence[str], trace: Trace) -> Callable[[], list[list[int]]]:
    """Return a maker of prompts of equal length that no earlier round has asked."""
    count = 0
    body = [token for text in texts for token in encoder.encode(text)]
    body *= 1 + (trace.num_requests * trace.num_prompt_tokens) // max(len(body), 1)

    def make() -> list[list[int]]:
        nonlocal count
        made = []
        for request in range(trace.num_requests):
            count += 1
            start = request * trace.num_prompt_tokens
            ids = [*encoder.encode(f"{count:05} "), *body[start : start + trace.num_prompt_tokens]]
            made.append(ids[: trace.num_prompt_tokens])
        return made

    return make


def _run_round(service: EngineService, prompts: Sequence[Sequence[int]], trace: Trace) -> Round:
    def ask(token_ids: Sequence[int]) -> tuple[float, float, int]:
        start_s = time.perf_counter()
        times_s: list[float] = []
        num_tokens = 0
        for new in service.stream(token_ids, trace.num_output_tokens):
            times_s.append(time.perf_counter())
            num_tokens += len(new)
        return times_s[0] - start_s, (times_s[-1] - times_s[0]) / max(num_tokens - 1, 1), num_tokens

    start_s = time.perf_counter()
    with ThreadPoolExecutor(trace.concurrency) as pool:
        answers = list(pool.map(ask, prompts))
    elapsed_s = time.perf_counter() - start_s
    return Round(
        elapsed_s,
        sum(num_tokens for _, _, num_tokens in answers),
        median(ttft_s for ttft_s, _, _ in answers),
        median(itl_s for _, itl_s, _ in answers),
    )
