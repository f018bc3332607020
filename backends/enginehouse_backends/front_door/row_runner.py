"""Running one row: engine deltas become text responses, and each sequence gets one last response with its usage.

The last response waits for the engine's own end of the sequence, so that its counts are the engine's. A sequence that a
stop string ended is stopped in the engine first; its text was sent before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_backends.front_door.generation import SequenceText, TextDelta
from enginehouse_backends.tokenization.detokenizer import decode_tokens
from enginehouse_backends.tokenization.stop_strings import StopAutomaton
from enginehouse_contract.money import format_amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from enginehouse_backends.front_door.door import FrontDoor, Job
    from enginehouse_backends.front_door.engine_client import EngineDelta
    from enginehouse_backends.front_door.generation import FinishReasonName
    from enginehouse_backends.tokenization.vocabulary import Vocabulary

    Outputs = dict[str, NDArray[Any]]


_ENDS_WITH_TEXT = frozenset({"timeout", "stop"})
"""Early ends that answer with the text so far; a client that left wants none."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a front door model renders text."""

    skip_special_tokens: bool = True
    accumulate_tokens: bool = False  # each response carries the whole text so far (NVIDIA's option of this name)


@dataclass(slots=True)
class _Sequence:
    text: SequenceText
    unsent_text: list[str] = field(default_factory=list)
    unsent_log_probs: list[float] = field(default_factory=list)
    unsent_logits: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    cum_log_prob: float = 0.0
    end: TextDelta | None = None  # says how it ended, once it has
    is_sent: bool = False  # its last response

    def add(self, delta: TextDelta) -> None:
        """Keep a text delta for the next response."""
        self.unsent_text.append(delta.text)
        self.unsent_log_probs.extend(delta.log_probs)
        if delta.cum_log_prob is not None:
            self.cum_log_prob = delta.cum_log_prob
        if delta.finish_reason is not None:
            self.end = delta


class RowRunner:
    """Turns one job's engine deltas into responses."""

    def __init__(self, job: Job, vocabulary: Vocabulary, options: TextOptions, end_id: int | None) -> None:
        self._job = job
        self._vocabulary = vocabulary
        self._options = options
        automaton = StopAutomaton(job.row.stop_words)
        self._sequences = [
            _Sequence(
                SequenceText.start(
                    vocabulary,
                    automaton,
                    sequence_index=index,
                    min_tokens=job.row.min_tokens,
                    max_tokens=job.row.max_tokens,
                    end_id=end_id,
                    include_stop=job.row.include_stop,
                    skip_special_tokens=options.skip_special_tokens,
                )
            )
            for index in range(job.row.num_sequences)
        ]

    def run(self, door: FrontDoor, deltas: Iterator[EngineDelta]) -> None:
        """Send every response of the row; raise what the engine raised, unless the job was ended early with text."""
        for delta in self._until_early_end(deltas):
            self._take(door, delta)
        for sequence in self._sequences:
            if not sequence.is_sent:
                self._send_last(sequence, {})

    def _until_early_end(self, deltas: Iterator[EngineDelta]) -> Iterator[EngineDelta]:
        """The engine's deltas; its error is no error where the row was ended early and has text."""
        try:
            yield from deltas
        except Exception:
            if self._job.end_reason not in _ENDS_WITH_TEXT or not any(s.text.num_tokens for s in self._sequences):
                raise

    def _take(self, door: FrontDoor, delta: EngineDelta) -> None:
        sequence = self._sequences[delta.sequence_index]
        usage = self._job.usage.sequences[delta.sequence_index]
        door.charge_output(self._job, len(delta.token_ids))
        usage.num_generated_tokens += len(delta.token_ids)
        usage.metrics = delta.metrics or usage.metrics
        if sequence.is_sent:
            return
        sequence.add(sequence.text.push(delta.token_ids, delta.log_probs, delta.cum_log_prob))
        usage.num_output_tokens = sequence.text.num_tokens
        if delta.logits:
            sequence.unsent_logits.append(delta.logits)
        if delta.metrics is not None:
            self._send_last(sequence, delta.metrics)
        elif self._job.row.is_streaming and (any(sequence.unsent_text) or sequence.unsent_logits):
            self._job.request.send(self._outputs(sequence), ends_sequence=False)
        if not sequence.is_sent:  # after the answer: the ledger's thread begins to write, and takes the GIL
            self._job.accounting.progress(self._job.usage.tokens())
        if all(other.end is not None for other in self._sequences) and not all(o.is_sent for o in self._sequences):
            door.stop(self._job, "stop")

    def _send_last(self, sequence: _Sequence, metrics: Outputs) -> None:
        if sequence.end is None:
            sequence.add(sequence.text.end(self._job.end_reason or "stop"))
        end = sequence.end
        assert end is not None, "ending a sequence's text says how it ended"
        sequence.is_sent = True
        usage = self._job.usage
        counts = usage.sequences[sequence.text.sequence_index]
        outputs = {
            **self._outputs(sequence),
            **(metrics if self._job.row.wants_perf_metrics else {}),
            "finish_reason": _strings(end.finish_reason or "stop"),
            "stop_reason": _strings(end.stop_reason or ""),
            "num_input_tokens": np.array([[usage.num_input_tokens]], np.int32),
            "num_output_tokens": np.array([[sequence.text.num_tokens]], np.int32),
            "request_id": _strings(self._job.request.request_id),
            "build_id": _strings(self._job.route.build_id),
        }
        if (num_cached := usage.num_cached_input_tokens) is not None:
            outputs["num_cached_input_tokens"] = np.array([[num_cached]], np.int32)
        if (num_drafts := counts.count("total_draft_tokens")) is not None:
            num_accepted = counts.count("total_accepted_draft_tokens") or 0
            outputs["num_draft_tokens"] = np.array([[num_drafts]], np.int32)
            outputs["num_accepted_draft_tokens"] = np.array([[num_accepted]], np.int32)
        if all(other.is_sent for other in self._sequences):
            outputs.update(self._settle(end.finish_reason or "stop"))
        self._job.request.send(outputs, ends_sequence=True)

    def _settle(self, reason: FinishReasonName) -> Outputs:
        """End the row's accounting, durably, and tell what it came to."""
        job = self._job
        record = job.settle(reason)
        outputs: Outputs = {}
        if record is not None and record.amount is not None:
            outputs["cost"] = _strings(format_amount(record.amount))
            outputs["currency"] = _strings(record.currency or "")
            outputs["price_book_id"] = _strings(record.book_id or "")
        share = job.usage.share()
        if share is not None and job.usage.tells_energy:
            outputs["energy_joules"] = np.array([[share.energy_uj / 1e6]])
            outputs["is_energy_estimated"] = np.array([[share.is_estimated]])
        if warnings := job.accounting.soft_limits:
            outputs["budget_warnings"] = np.array([[warning.encode() for warning in warnings]], np.object_)
        return outputs

    def _outputs(self, sequence: _Sequence) -> Outputs:
        """Take what was not sent yet of this sequence."""
        row = self._job.row
        text = "".join(sequence.unsent_text)
        if not self._options.accumulate_tokens:
            sequence.unsent_text.clear()
        if not row.is_streaming and not row.exclude_input:
            skip = self._options.skip_special_tokens
            text = decode_tokens(self._vocabulary, self._job.prompt_token_ids, skip_special_tokens=skip) + text
        outputs: Outputs = {"text_output": _strings(text)}
        if self._job.row_index is not None:
            outputs["batch_index"] = np.array([[self._job.row_index]], np.int32)
        if row.num_sequences > 1:
            outputs["sequence_index"] = np.array([[sequence.text.sequence_index]], np.int32)
        if row.wants_log_probs:
            outputs["output_log_probs"] = np.array(sequence.unsent_log_probs, np.float32).reshape(1, 1, -1)
            outputs["cum_log_probs"] = np.array([[sequence.cum_log_prob]], np.float32)
            sequence.unsent_log_probs.clear()
        for logits in sequence.unsent_logits:
            for name, values in logits.items():
                # Only generation logits come in several parts; their tokens are the last axis but one.
                outputs[name] = np.concatenate([outputs[name], values], axis=-2) if name in outputs else values
        sequence.unsent_logits.clear()
        return outputs


def _strings(text: str) -> NDArray[np.object_]:
    return np.array([[text.encode()]], np.object_)
