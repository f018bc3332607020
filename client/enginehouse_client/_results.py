"""What the server answers, typed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from enginehouse_contract.tensors import PERF_METRIC_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence; ``None`` where the model does not report one."""

    num_input_tokens: int | None = None
    num_cached_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_draft_tokens: int | None = None  # verified
    num_accepted_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What an answer cost, by which price book (its id is the digest of its content)."""

    amount: Decimal
    currency: str
    price_book_id: str


@dataclass(frozen=True, slots=True)
class Energy:
    """The answer's part of the machine's energy; estimated where the power is declared rather than measured."""

    joules: float
    is_estimated: bool


@dataclass(frozen=True, slots=True)
class ModelState:
    """One version of one model on the server."""

    name: str
    version: str
    state: str  # Triton's: READY, LOADING, UNLOADING, UNAVAILABLE; empty for a model that was never loaded
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether it answers requests."""
        return self.state == "READY"


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of one sequence. The last piece of a sequence has its finish reason and usage (front door).

    ``usage.num_output_tokens`` of the pieces add up to the sequence's (the front door tells all on the last piece).
    Cost and energy are the whole answer's and come with its very last piece; None is unknown, not 0.
    """

    text: str
    sequence_index: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float | None = None
    usage: Usage = field(default_factory=Usage)
    metrics: Mapping[str, float] = field(default_factory=dict)  # with return_perf_metrics, on the last piece
    request_id: str | None = None
    build_id: str | None = None
    cost: Cost | None = None
    energy: Energy | None = None
    budget_warnings: tuple[str, ...] = ()  # soft limits that this request passed


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """One whole sequence; ``log_probs`` one for each token (nats), where they were asked for."""

    text: str
    finish_reason: str | None
    stop_reason: str | None
    log_probs: tuple[float, ...]
    cum_log_prob: float | None
    usage: Usage
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A whole answer: ``sequences`` in the order of their index, ``text`` that of the first."""

    sequences: tuple[GeneratedSequence, ...]
    request_id: str | None
    build_id: str | None
    cost: Cost | None = None  # None: not known
    energy: Energy | None = None
    budget_warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first sequence."""
        return self.sequences[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Usage of the first sequence."""
        return self.sequences[0].usage


def make_chunk(outputs: Mapping[str, list[Any]]) -> GenerationChunk:
    """Read one response's outputs, each a flat list."""

    def first(name: str) -> Any:
        values = outputs.get(name)
        return values[0] if values else None

    usage = Usage(*(first(field.name) for field in fields(Usage)))
    amount, joules = first("cost"), first("energy_joules")
    return GenerationChunk(
        text=first("text_output") or "",
        sequence_index=int(first("sequence_index") or 0),
        finish_reason=first("finish_reason") or None,
        stop_reason=first("stop_reason") or None,
        log_probs=tuple(outputs.get("output_log_probs", ())),
        cum_log_prob=first("cum_log_probs"),
        usage=usage,
        metrics={name: first(name) for name in PERF_METRIC_NAMES if first(name) is not None},
        request_id=first("request_id"),
        build_id=first("build_id"),
        cost=None if amount is None else Cost(Decimal(amount), first("currency") or "", first("price_book_id") or ""),
        energy=None if joules is None else Energy(joules, bool(first("is_energy_estimated"))),
        budget_warnings=tuple(outputs.get("budget_warnings", ())),
    )


def join_chunks(chunks: Iterable[GenerationChunk]) -> GenerationResult:
    """Put the pieces of an answer together."""
    by_index: dict[int, list[GenerationChunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.sequence_index, []).append(chunk)
    every = [chunk for index in sorted(by_index) for chunk in by_index[index]]
    return GenerationResult(
        tuple(_join_sequence(by_index[index]) for index in sorted(by_index)) or (_join_sequence([]),),
        request_id=next((chunk.request_id for chunk in every if chunk.request_id), None),
        build_id=next((chunk.build_id for chunk in every if chunk.build_id), None),
        cost=next((chunk.cost for chunk in every if chunk.cost), None),
        energy=next((chunk.energy for chunk in every if chunk.energy), None),
        budget_warnings=next((chunk.budget_warnings for chunk in every if chunk.budget_warnings), ()),
    )


def _join_sequence(chunks: list[GenerationChunk]) -> GeneratedSequence:
    last = chunks[-1] if chunks else GenerationChunk("")
    return GeneratedSequence(
        text="".join(chunk.text for chunk in chunks),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        log_probs=tuple(value for chunk in chunks for value in chunk.log_probs),
        cum_log_prob=last.cum_log_prob,
        usage=replace(
            _last_known_usage(chunks),
            num_output_tokens=sum(counts)
            if (counts := [c for chunk in chunks if (c := chunk.usage.num_output_tokens) is not None])
            else None,
        ),
        metrics=last.metrics,
    )


def _last_known_usage(chunks: list[GenerationChunk]) -> Usage:
    known: dict[str, int] = {}
    for chunk in chunks:
        known.update((name, count) for name, count in asdict(chunk.usage).items() if count is not None)
    return Usage(**known)
