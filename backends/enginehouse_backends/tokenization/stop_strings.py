"""Stop strings on streamed text: never leaking a part of one, wherever the chunks are cut.

A :class:`WordAutomaton` reads each character once. Its depth is the length of the longest tail that may still become a
stop string: exactly that tail is held back. The first string to be completed wins, and of those completed by the same
character the longest, so the result does not depend on how the text was cut into chunks.
"""

from __future__ import annotations

from typing import NamedTuple

from enginehouse_backends.tokenization.word_automaton import WordAutomaton


class StopResult(NamedTuple):
    """Text that may be shown now, and the stop string that ended the sequence, if one did."""

    text: str
    stop: str | None


StopAutomaton = WordAutomaton[str]
"""The stop strings of one request; shared by its sequences."""


class StopStrings:
    """The stop strings over one sequence's text."""

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool = False) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Add text; after a result with ``stop`` the sequence is over and nothing more may be pushed."""
        if not self._automaton:
            return StopResult(text, None)
        text_start = len(self._held)
        seen = self._held + text
        state = self._state
        for position in range(text_start, len(seen)):
            state = self._automaton.step(state, seen[position])
            if (word := self._automaton.word(state)) is not None:
                end = position + 1 if self._include_stop else position + 1 - len(word)
                self._held = ""
                return StopResult(seen[:end], word)
        self._state = state
        shown = len(seen) - self._automaton.depth(state)
        self._held = seen[shown:]
        return StopResult(seen[:shown], None)

    def flush(self) -> str:
        """Return the held text once no more will come."""
        held, self._held, self._state = self._held, "", 0
        return held
