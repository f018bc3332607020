"""Many words found in one pass over a text, whatever its symbols are: characters, bytes or token ids.

An Aho-Corasick automaton (Aho and Corasick 1975) reads each symbol once. Its state is one number, so that following a
text needs no copy of it, and says which words have ended and which have begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Word = TypeVar("Word", bound=Sequence[Hashable])


@dataclass(slots=True)
class _Node(Generic[Word]):
    depth: int
    children: dict[Hashable, int] = field(default_factory=dict)
    fallback: int = 0
    word: Word | None = None  # the longest word that ends here


class WordAutomaton(Generic[Word]):
    """A set of words; immutable, so sequences may share it. Empty words are ignored. State 0 is the start."""

    def __init__(self, words: Iterable[Word]) -> None:
        self._nodes: list[_Node[Word]] = [_Node(depth=0)]
        for word in words:
            if word:
                self._add(word)
        self._link()

    def __bool__(self) -> bool:
        return len(self._nodes) > 1

    def step(self, state: int, symbol: Hashable) -> int:
        """Return the state after *symbol*."""
        nodes = self._nodes
        while (following := nodes[state].children.get(symbol)) is None:
            if state == 0:
                return 0
            state = nodes[state].fallback
        return following

    def depth(self, state: int) -> int:
        """Return how many of the last symbols may still become a word."""
        return self._nodes[state].depth

    def word(self, state: int) -> Word | None:
        """Return the longest word that ends in *state*."""
        return self._nodes[state].word

    def continuations(
        self, state: int, may_go_on: Callable[[tuple[Hashable, ...]], bool]
    ) -> Iterator[tuple[Hashable, ...]]:
        """Yield what would complete a word that has begun in *state*.

        One is followed beyond its first symbol only as long as *may_go_on* says so of what it has so far. Those that
        begin with another one are left out.
        """
        nodes = self._nodes
        while state:
            pending: list[tuple[int, tuple[Hashable, ...]]] = [(state, ())]
            while pending:
                parent, missing = pending.pop()
                for symbol, child in nodes[parent].children.items():
                    longer = (*missing, symbol)
                    word = nodes[child].word
                    if word is not None and len(word) == nodes[child].depth:
                        yield longer
                    elif may_go_on(longer):
                        pending.append((child, longer))
            state = nodes[state].fallback

    def _add(self, word: Word) -> None:
        state = 0
        for symbol in word:
            following = self._nodes[state].children.get(symbol)
            if following is None:
                following = len(self._nodes)
                self._nodes[state].children[symbol] = following
                self._nodes.append(_Node(depth=self._nodes[state].depth + 1))
            state = following
        self._nodes[state].word = word

    def _link(self) -> None:
        """Set each node's fallback, breadth first: the node of its longest proper suffix that is in the trie."""
        pending = deque(self._nodes[0].children.values())
        while pending:
            node = self._nodes[pending.popleft()]
            if node.word is None:
                node.word = self._nodes[node.fallback].word
            for symbol, child in node.children.items():
                self._nodes[child].fallback = self.step(node.fallback, symbol)
                pending.append(child)
