"""The speed gate: one fixed trace over the build and its reference, in alternating rounds.

A machine's speed drifts with whatever else it does, so builds are compared within pairs of rounds next to each other
(A B, B A, A B), and the median of the pairs' ratios decides. What fails is measured longer before it has failed, since
on a busy machine three pairs may mislead. Every round's prompts begin with words of their own, so that no round finds
the prefix of another in the cache.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from enginehouse_builders.gates.record import GateResult
from enginehouse_contract.errors import EngineFailureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from enginehouse_builders.gates.record import Value
    from enginehouse_builders.gates.services import EngineService, PromptEncoder
    from enginehouse_builders.spec.model import SpeedGate

    OpenService = Callable[[], EngineService]

_MS: Final = 1e3
_NUM_WAKING_TOKENS: Final = 2
_LEAST: Final = 1e-9  # of what ratios are taken of: an answer in one piece has no time between tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """What is asked in every round: how many requests, of how many tokens, how many at a time."""

    num_requests: int = 8
    num_prompt_tokens: int = 48
    num_output_tokens: int = 32
    concurrency: int = 4
    num_pairs: int = 3
    max_pairs: int = 9  # of a build that seems to fail


class PromptMaker:
    """Makes prompts of equal length that were never made before, out of texts."""

    def __init__(self, encoder: PromptEncoder, texts: Sequence[str]) -> None:
        self._encoder = encoder
        self._body = [token for text in texts for token in encoder.encode(text)]
        self._num_made = 0

    def make(self, num_tokens: int) -> list[int]:
        """Return a prompt: a number of its own, then text."""
        self._num_made += 1
        start = self._num_made * num_tokens % len(self._body)
        repeated = self._body[start:] + self._body * (1 + num_tokens // len(self._body))
        return [*self._encoder.encode(f"{self._num_made:05} "), *repeated][:num_tokens]


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


def speed_gate(
    open_build: OpenService,
    open_reference: OpenService | None,
    prompts: PromptMaker,
    limits: SpeedGate,
    trace: Trace,
) -> tuple[GateResult, SpeedRun]:
    """Run the trace over both builds and judge; the first round of each is not counted.

    Raises errors of our tree when an engine fails.
    """
    services = [open_build] if open_reference is None else [open_build, open_reference]
    rounds: list[list[Round]] = [[] for _ in services]
    for open_service in services:
        _run_round(open_service(), prompts, trace)
    while True:
        num_pairs = len(rounds[0])
        for index in range(len(services)) if num_pairs % 2 == 0 else reversed(range(len(services))):
            rounds[index].append(_run_round(services[index](), prompts, trace))
        run = SpeedRun(tuple(rounds[0]), tuple(rounds[1]) if open_reference is not None else ())
        if num_pairs + 1 < trace.num_pairs:
            continue
        result = judge(run, limits)
        if result.status == "passed" or num_pairs + 1 >= trace.max_pairs:
            return result, run


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
    return median(
        quantity(ours) / max(quantity(theirs), _LEAST) for ours, theirs in zip(run.build, run.reference, strict=True)
    )


def _run_round(service: EngineService, prompts: PromptMaker, trace: Trace) -> Round:
    for _ in service.stream(prompts.make(trace.num_prompt_tokens), _NUM_WAKING_TOKENS):
        pass  # what was just loaded wakes up
    asked = [prompts.make(trace.num_prompt_tokens) for _ in range(trace.num_requests)]

    def ask(token_ids: Sequence[int]) -> tuple[float, float, int]:
        start_s = time.perf_counter()
        times_s: list[float] = []
        num_tokens = 0
        for new in service.stream(token_ids, trace.num_output_tokens):
            times_s.append(time.perf_counter())
            num_tokens += len(new)
        if not times_s:
            raise EngineFailureError("the engine ended an answer without a token")
        return times_s[0] - start_s, (times_s[-1] - times_s[0]) / max(num_tokens - 1, 1), num_tokens

    start_s = time.perf_counter()
    with ThreadPoolExecutor(trace.concurrency) as pool:
        answers = list(pool.map(ask, asked))
    elapsed_s = time.perf_counter() - start_s
    return Round(
        elapsed_s,
        sum(num_tokens for _, _, num_tokens in answers),
        median(ttft_s for ttft_s, _, _ in answers),
        median(itl_s for _, itl_s, _ in answers),
    )
