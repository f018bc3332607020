"""Stop strings on streamed text: never leaking a part of one, wherever the chunks are cut.

An Aho-Corasick automaton (Aho and Corasick 1975) reads each character once. Its depth is the length of the longest tail
that may still become a stop string: exactly that tail is held back. The first string to be completed wins, and of those
completed by the same character the longest, so the result does not depend on how the text was cut into chunks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopResult(NamedTuple):
    """Text that may be shown now, and the stop string that ended the sequence, if one did."""

    text: str
    stop: str | None


@dataclass(slots=True)
class _Node:
    depth: int
    children: dict[str, int] = field(default_factory=dict)
    fallback: int = 0
    word: str | None = None  # the longest stop string that ends here


class StopAutomaton:
    """The stop strings of one request; shared by its sequences. Empty strings are ignored."""

    def __init__(self, words: Iterable[str]) -> None:
        self._nodes = [_Node(depth=0)]
        for word in words:
            if word:
                self._add(word)
        self._link()

    def __bool__(self) -> bool:
        return len(self._nodes) > 1

    def step(self, state: int, character: str) -> int:
        """Return the state after *character*; 0 is the start."""
        nodes = self._nodes
        while (following := nodes[state].children.get(character)) is None:
            if state == 0:
                return 0
            state = nodes[state].fallback
        return following

    def depth(self, state: int) -> int:
        """Return how many of the last characters may still become a stop string."""
        return self._nodes[state].depth

    def word(self, state: int) -> str | None:
        """Return the longest stop string that ends in *state*."""
        return self._nodes[state].word

    def _add(self, word: str) -> None:
        state = 0
        for character in word:
            following = self._nodes[state].children.get(character)
            if following is None:
                following = len(self._nodes)
                self._nodes[state].children[character] = following
                self._nodes.append(_Node(depth=self._nodes[state].depth + 1))
            state = following
        self._nodes[state].word = word

    def _link(self) -> None:
        """Set each node's fallback, breadth first: the node of its longest proper suffix that is in the trie."""
        pending = deque(self._nodes[0].children.values())
        while pending:
            state = pending.popleft()
            node = self._nodes[state]
            if node.word is None:
                node.word = self._nodes[node.fallback].word
            for character, child in node.children.items():
                self._nodes[child].fallback = self.step(node.fallback, character)
                pending.append(child)


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
