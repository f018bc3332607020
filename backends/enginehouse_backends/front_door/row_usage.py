"""What a row used: from its engine's counts to the token classes that are billed, and those that only cost.

Exact at a sequence's end, when the engine has told its counts; before, the whole prompt counts as computed. Where the
engine is not ours, cached tokens are its reused blocks, and its part of the machine is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginehouse_backends.accounting.records import ComputeShare
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Metrics = Mapping[str, NDArray[Any]]


@dataclass(slots=True)
class SequenceUsage:
    """The counts of one sequence so far."""

    num_output_tokens: int = 0  # up to its end
    num_generated_tokens: int = 0  # by the engine
    metrics: Metrics | None = None  # of its last response

    def count(self, name: str) -> int | None:
        """Return one of the engine's counts, once it has told it."""
        value = (self.metrics or {}).get(name)
        return None if value is None else int(value.reshape(-1)[0])

    def num_cached_tokens(self, num_input_tokens: int, tokens_per_block: int) -> int:
        """Return how much of the prompt was found in the engine's cache."""
        num_cached = self.count("num_cached_input_tokens")
        if num_cached is None:
            num_cached = (self.count("kv_cache_reused_blocks") or 0) * tokens_per_block
        return min(num_cached, num_input_tokens)

    @property
    def was_started(self) -> bool:
        """Whether the engine began to compute it."""
        return bool(self.num_generated_tokens or self.count("first_scheduled_time_ns"))


@dataclass(slots=True)
class RowUsage:
    """The counts of a row. Its own thread changes them; others may look at any time."""

    num_input_tokens: int
    num_sequences: int
    tokens_per_block: int = 32  # of the engine's KV cache, where it tells reused blocks only
    sequences: list[SequenceUsage] = field(init=False)

    def __post_init__(self) -> None:
        self.sequences = [SequenceUsage() for _ in range(self.num_sequences)]

    @property
    def num_cached_input_tokens(self) -> int | None:
        """Tokens of the prompt that were not computed for the row's first sequence; None until the engine tells."""
        first = self.sequences[0]
        return first.num_cached_tokens(self.num_input_tokens, self.tokens_per_block) if first.metrics else None

    def upper_bound(self, max_tokens: int) -> TokenUsage:
        """Return the most that the row may be billed."""
        return TokenUsage(self.num_input_tokens, 0, max_tokens * self.num_sequences)

    def tokens(self) -> TokenUsage:
        """Return what was used so far. A prompt that was begun counts as a whole, and once for all its sequences."""
        started = [sequence for sequence in self.sequences if sequence.was_started]
        if not started:
            return TokenUsage()
        first, *others = started
        num_cached = first.num_cached_tokens(self.num_input_tokens, self.tokens_per_block)
        again = [
            self.num_input_tokens - other.num_cached_tokens(self.num_input_tokens, self.tokens_per_block)
            for other in others
            if other.metrics
        ]
        return TokenUsage(
            num_input_uncached_tokens=self.num_input_tokens - num_cached,
            num_input_cached_tokens=num_cached,
            num_output_tokens=sum(sequence.num_output_tokens for sequence in started),
            num_draft_rejected_tokens=self._sum("total_draft_tokens") - self._sum("total_accepted_draft_tokens"),
            num_recomputed_tokens=self._sum("num_recomputed_tokens") + sum(again),
            num_discarded_tokens=sum(each.num_generated_tokens - each.num_output_tokens for each in started),
        )

    def share(self) -> ComputeShare | None:
        """Return the row's part of the machine; None where no engine told."""
        if not any(sequence.count("machine_time_ns") is not None for sequence in self.sequences):
            return None
        is_estimated = any(sequence.count("is_energy_estimated") for sequence in self.sequences)
        return ComputeShare(self._sum("energy_uj"), self._sum("machine_time_ns"), is_estimated)

    @property
    def tells_energy(self) -> bool:
        """Whether the engine told energy: without it, energy is unknown, not 0."""
        return any(sequence.count("energy_uj") is not None for sequence in self.sequences)

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified."""
        return self._sum("total_draft_tokens")

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafts that were accepted."""
        return self._sum("total_accepted_draft_tokens")

    def _sum(self, name: str) -> int:
        return sum(sequence.count(name) or 0 for sequence in self.sequences)
