"""One row's text: engine tokens in, exact text deltas and an honest end out.

Pure: no server, no threads. The engine answers deltas of token ids per sequence; text that could still become a stop
string or the rest of a character is held back; the end of each sequence has its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from enginehouse_backends.tokenization.detokenizer import IncrementalDetokenizer
from enginehouse_backends.tokenization.stop_strings import StopResult, StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginehouse_backends.tokenization.stop_strings import StopAutomaton
    from enginehouse_backends.tokenization.vocabulary import Vocabulary

FinishReasonName = Literal["stop", "length", "cancelled", "error", "timeout"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sequence, how many tokens it took, and the end if this is it."""

    sequence_index: int
    text: str
    num_new_tokens: int
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: str | None = None  # the stop string, where one ended the sequence


@dataclass(slots=True)
class SequenceText:
    """The text of one sequence as it grows. Its limits tell its end before the engine does."""

    sequence_index: int
    min_tokens: int
    max_tokens: int
    end_id: int | None
    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    num_tokens: int = 0
    is_finished: bool = False
    _held_log_probs: list[float] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        vocabulary: Vocabulary,
        automaton: StopAutomaton,
        *,
        sequence_index: int,
        min_tokens: int,
        max_tokens: int,
        end_id: int | None,
        include_stop: bool,
        skip_special_tokens: bool,
    ) -> SequenceText:
        """Start a sequence's text."""
        return cls(
            sequence_index,
            min_tokens,
            max_tokens,
            end_id,
            IncrementalDetokenizer(vocabulary, skip_special_tokens=skip_special_tokens),
            StopStrings(automaton, include_stop=include_stop),
        )

    def push(
        self, token_ids: Sequence[int], log_probs: Sequence[float] = (), cum_log_prob: float | None = None
    ) -> TextDelta:
        """Add the engine's new tokens; tokens after the sequence's end are ignored."""
        self._held_log_probs.extend(log_probs)
        text = []
        num_before = self.num_tokens
        for token_id in () if self.is_finished else token_ids:
            self.num_tokens += 1
            shown, stop = self._push_text(self.detokenizer.push((token_id,)))
            text.append(shown)
            if stop is not None:
                return self._finish("".join(text), self.num_tokens - num_before, "stop", stop, cum_log_prob)
            if token_id == self.end_id and self.num_tokens >= self.min_tokens:
                return self._end("".join(text), self.num_tokens - num_before, "stop", cum_log_prob)
            if self.num_tokens >= self.max_tokens:
                return self._end("".join(text), self.num_tokens - num_before, "length", cum_log_prob)
        return TextDelta(
            self.sequence_index, "".join(text), self.num_tokens - num_before, self._take_log_probs(), cum_log_prob
        )

    def end(self, reason: FinishReasonName) -> TextDelta:
        """End the sequence for a reason that its tokens do not show."""
        return self._end("", 0, reason, None)

    def _push_text(self, text: str) -> StopResult:
        """Look for stop strings, from the first token on that may end the sequence."""
        return StopResult(text, None) if self.num_tokens < self.min_tokens else self.stops.push(text)

    def _end(self, text: str, num_new: int, reason: FinishReasonName, cum_log_prob: float | None) -> TextDelta:
        """End with everything that was held back: it became neither a character's rest nor a stop string."""
        tail, stop = self.stops.push(self.detokenizer.flush())
        if stop is not None:
            return self._finish(text + tail, num_new, "stop", stop, cum_log_prob)
        return self._finish(text + tail + self.stops.flush(), num_new, reason, None, cum_log_prob)

    def _finish(
        self, text: str, num_new: int, reason: FinishReasonName, stop: str | None, cum_log_prob: float | None
    ) -> TextDelta:
        self.is_finished = True
        return TextDelta(
            self.sequence_index,
            text,
            num_new,
            self._take_log_probs(),
            cum_log_prob,
            finish_reason=reason,
            stop_reason=stop,
        )

    def _take_log_probs(self) -> tuple[float, ...]:
        log_probs = tuple(self._held_log_probs)
        self._held_log_probs.clear()
        return log_probs
