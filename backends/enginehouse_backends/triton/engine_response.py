"""From sequence outputs to the engine model's response tensors, as NVIDIA's backend shapes them.

A request of n rows yields n independent streams of batch-1 responses; one beam each. Streaming responses carry only new
tokens, cut at character boundaries so that each can be decoded on its own; others carry the prompt too unless it is
excluded. Counts are exact: generated tokens only, and of this response only, so that a stream's counts add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_backends.tokenization.detokenizer import complete_prefix_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import SequenceOutput, SequenceStats
    from enginehouse_backends.tokenization.vocabulary import Vocabulary
    from enginehouse_backends.triton.engine_request import EngineRow

Outputs = dict[str, "NDArray[Any]"]


@dataclass(slots=True)
class SequenceResponder:
    """Builds the responses of one sequence and holds back the tokens of a split character."""

    row: EngineRow
    row_index: int | None  # None where the Triton request has one row
    vocabulary: Vocabulary
    _held_token_ids: list[int] = field(default_factory=list)
    _held_log_probs: list[float] = field(default_factory=list)
    _held_generation_logits: list[NDArray[np.float32]] = field(default_factory=list)
    _held_context_logits: NDArray[np.float32] | None = None

    def respond(self, output: SequenceOutput) -> Outputs | None:
        """Return the tensors of the next response, or None when everything is held back for now."""
        self._held_token_ids.extend(output.token_ids)
        self._held_log_probs.extend(output.log_probs)
        if output.generation_logits is not None:
            self._held_generation_logits.extend(output.generation_logits)
        if output.context_logits is not None:
            self._held_context_logits = output.context_logits
        is_last = output.finish_reason is not None
        count = len(self._held_token_ids) if is_last else complete_prefix_length(self.vocabulary, self._held_token_ids)
        if count == 0 and not is_last:
            return None
        new_ids, self._held_token_ids = self._held_token_ids[:count], self._held_token_ids[count:]
        log_probs, self._held_log_probs = self._held_log_probs[:count], self._held_log_probs[count:]
        logits, self._held_generation_logits = (
            self._held_generation_logits[:count],
            self._held_generation_logits[count:],
        )
        return self._tensors(output, new_ids, log_probs, logits)

    def _tensors(
        self,
        output: SequenceOutput,
        new_ids: Sequence[int],
        log_probs: Sequence[float],
        logits: Sequence[NDArray[np.float32]],
    ) -> Outputs:
        report, generation = self.row.report, self.row.generation
        include_prompt = not report.streaming and not report.exclude_input
        ids = [*generation.prompt_token_ids, *new_ids] if include_prompt else new_ids
        outputs: Outputs = {
            "output_ids": np.array(ids, np.int32).reshape(1, 1, len(ids)),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        if self.row_index is not None:
            outputs["batch_index"] = np.array([[self.row_index]], np.int32)
        if generation.num_return_sequences > 1:
            outputs["sequence_index"] = np.array([[output.sequence_index]], np.int32)
        if report.log_probs:
            outputs["cum_log_probs"] = np.array([[output.cum_log_prob]], np.float32)
            outputs["output_log_probs"] = np.array(log_probs, np.float32).reshape(1, 1, len(log_probs))
        if report.num_input_tokens:
            outputs["num_input_tokens"] = np.array([[len(generation.prompt_token_ids)]], np.int32)
        if report.num_output_tokens:
            outputs["num_output_tokens"] = np.array([[len(new_ids)]], np.int32)
        if self._held_context_logits is not None:
            outputs["context_logits"] = self._held_context_logits[None]
            self._held_context_logits = None
        if logits:
            outputs["generation_logits"] = np.stack(logits)[None, None]
        if report.perf_metrics and output.finish_reason is not None:
            outputs.update(_perf_metrics(output.stats))
        return outputs


def _perf_metrics(stats: SequenceStats) -> Outputs:
    acceptance_rate = stats.num_accepted_draft_tokens / stats.num_draft_tokens if stats.num_draft_tokens else 0.0
    counts = {
        "kv_cache_alloc_new_blocks": stats.num_new_blocks,
        "kv_cache_reused_blocks": stats.num_reused_blocks,
        "kv_cache_alloc_total_blocks": stats.num_allocated_blocks,
        "total_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "total_draft_tokens": stats.num_draft_tokens,
    }
    times_ns = {
        "arrival_time_ns": stats.arrival_time_ns,
        "first_scheduled_time_ns": stats.first_scheduled_time_ns,
        "first_token_time_ns": stats.first_token_time_ns,
        "last_token_time_ns": stats.last_token_time_ns,
    }
    usage: Outputs = {
        "num_cached_input_tokens": np.array([[stats.num_cached_prompt_tokens]], np.int32),
        "num_recomputed_tokens": np.array([[stats.num_recomputed_tokens]], np.int32),
        "machine_time_ns": np.array([[stats.machine_time_ns]], np.int64),
    }
    if stats.energy_uj is not None:
        usage["energy_uj"] = np.array([[stats.energy_uj]], np.int64)
        usage["is_energy_estimated"] = np.array([[stats.is_energy_estimated]])
    return {
        **usage,
        **{name: np.array([[value]], np.int32) for name, value in counts.items()},
        **{name: np.array([[value]], np.int64) for name, value in times_ns.items()},
        "acceptance_rate": np.array([[acceptance_rate]], np.float32),
    }
