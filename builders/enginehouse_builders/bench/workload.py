"""The requests of a run, decided by a seed: what is asked, when, and by whom.

Lengths, prompts, arrivals and cancellations are drawn from streams of their own, so that two runs of one seed ask the
same questions at any rate.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from enginehouse_builders.bench.arrivals import arrival_times_s
from enginehouse_builders.bench.prompts import make_prompt
from enginehouse_builders.bench.trace import TraceLine
from enginehouse_contract.errors import InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from enginehouse_builders.bench.lengths import Lengths

LoopKind = Literal["open", "closed"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What to ask, how often and for how long.

    The loop is open (arrivals that wait for nobody) with ``rate_per_s``, or with a trace that has times; else closed,
    with ``concurrency`` requests in flight.
    """

    input_tokens: Lengths
    output_tokens: Lengths
    concurrency: int | None = None
    rate_per_s: float | None = None
    burstiness: float = 1.0  # squared coefficient of variation of the gaps
    trace: Sequence[TraceLine] = ()
    num_requests: int | None = None  # measured ones; none: by duration, or the trace's length
    duration_s: float | None = None  # from the first measured request
    num_warmup_requests: int = 0
    num_shared_prefix_tokens: int = 0
    num_prefixes: int = 1
    cancel_share: float = 0.0
    tenant: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be run, by name."""
        _require_at_least("concurrency", self.concurrency, 1)
        _require_at_least("num_requests", self.num_requests, 1)
        _require_at_least("warmup", self.num_warmup_requests, 0)
        _require_at_least("shared_prefix", self.num_shared_prefix_tokens, 0)
        _require_at_least("num_prefixes", self.num_prefixes, 1)
        _require_at_least("seed", self.seed, 0)
        if self.duration_s is not None and not (math.isfinite(self.duration_s) and self.duration_s > 0):
            raise InvalidRequestError(refusal("duration", "must be above 0 seconds", given=self.duration_s))
        if not 0 <= self.cancel_share <= 1:
            raise InvalidRequestError(refusal("cancel_share", "must lie in [0, 1]", given=self.cancel_share))
        if self.rate_per_s is not None:
            arrival_times_s(self.rate_per_s, self.burstiness, np.random.default_rng(0))  # checks both
            if self.concurrency is not None:
                problem = "and `concurrency` exclude each other"
                hint = "A rate waits for no answer, a concurrency waits for every one."
                raise InvalidRequestError(refusal("rate", problem, hint=hint))
        elif self.loop == "closed" and self.concurrency is None:
            raise InvalidRequestError(refusal("concurrency", "or `rate` is required, unless a trace has times"))

    @property
    def has_trace_times(self) -> bool:
        """Whether the trace says when each request is sent, and nothing overrides it."""
        timed = bool(self.trace) and self.trace[0].at_s is not None
        return timed and self.rate_per_s is None and self.concurrency is None

    @property
    def loop(self) -> LoopKind:
        """Whether arrivals wait for answers."""
        return "open" if self.rate_per_s is not None or self.has_trace_times else "closed"

    @property
    def num_measured_requests(self) -> int | None:
        """How many requests are measured; None is as many as the duration admits."""
        if self.num_requests is not None or self.duration_s is not None:
            return self.num_requests
        return max(len(self.trace) - self.num_warmup_requests, 1)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, before it is sent; ``at_s`` (open loop only) counts from the start of the run."""

    index: int
    at_s: float | None
    prompt: str
    max_tokens: int
    tenant: str | None = None
    priority: int | None = None
    cancel_after_pieces: int | None = None
    is_warmup: bool = False


def plan_requests(workload: Workload) -> Iterator[PlannedRequest]:
    """Yield the run's requests in order, lazily; the open loop's are those that arrive within the run.

    A closed loop by duration has no end of its own: whoever sends them stops.
    """
    seeds = np.random.SeedSequence(workload.seed).spawn(5)
    lengths, words, prefix_words, arrivals, cancels = map(np.random.default_rng, seeds)
    prefixes = [make_prompt(workload.num_shared_prefix_tokens, prefix_words) for _ in range(workload.num_prefixes)]
    lines = itertools.cycle(workload.trace) if workload.trace else itertools.repeat(TraceLine())
    until_s = math.inf
    for index, (line, at_s) in enumerate(zip(lines, _times_s(workload, arrivals), strict=False)):
        num_sent = index - workload.num_warmup_requests
        if workload.num_measured_requests is not None and num_sent >= workload.num_measured_requests:
            return
        if at_s is not None:
            if num_sent == 0 and workload.duration_s is not None:
                until_s = at_s + workload.duration_s
            if at_s > until_s:
                return
        num_input, num_output = workload.input_tokens.draw(lengths), workload.output_tokens.draw(lengths)
        max_tokens = line.max_tokens or num_output
        is_cancelled, cancel_at = cancels.random() < workload.cancel_share, int(cancels.integers(1, max(max_tokens, 2)))
        yield PlannedRequest(
            index,
            at_s,
            _prompt(line, num_input, prefixes[index % len(prefixes)], workload, words),
            max_tokens,
            line.tenant or workload.tenant,
            line.priority,
            cancel_at if is_cancelled else None,
            is_warmup=num_sent < 0,
        )


def _times_s(workload: Workload, random: np.random.Generator) -> Iterator[float | None]:
    if workload.has_trace_times:
        return (line.at_s for line in workload.trace)  # once: a trace's clock does not start again
    if workload.rate_per_s is not None:
        return arrival_times_s(workload.rate_per_s, workload.burstiness, random)
    return itertools.repeat(None)


def _prompt(line: TraceLine, num_drawn: int, prefix: str, workload: Workload, random: np.random.Generator) -> str:
    if line.prompt is not None:
        return f"{prefix} {line.prompt}" if prefix else line.prompt
    num_tokens = max((line.num_input_tokens or num_drawn) - workload.num_shared_prefix_tokens, 1)
    own = make_prompt(num_tokens, random)
    return f"{prefix} {own}" if prefix else own


def _require_at_least(field: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise InvalidRequestError(refusal(field, f"must be at least {minimum}", given=value))
