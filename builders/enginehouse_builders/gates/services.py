"""What gates ask of the rest: a build served by a real server, and its tokenizer. Implemented outside this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from enginehouse_builders.store import StoredBuild


class PromptEncoder(Protocol):
    """A build's tokenizer and chat template."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt."""
        ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Return the token ids of chat messages ready for an answer, or None where the build has no template."""
        ...


class EngineService(Protocol):
    """A build's engine behind a real server; a method raises an error of our tree when the engine fails or is gone."""

    served_build_id: str  # as read back from the server's own config of the model

    def stream(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[list[int]]:
        """Generate *num_tokens* greedily, whatever they are; yield new ids as they come."""
        ...

    def context_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after each of *token_ids*, [tokens, vocab]."""
        ...


class GateTools(Protocol):
    """How a command gives the gates what they may not import."""

    def encoder(self, build: StoredBuild) -> PromptEncoder:
        """Load a build's tokenizer; raise :class:`BuildIntegrityError` when it cannot be."""
        ...

    def serve(self, build: StoredBuild) -> AbstractContextManager[EngineService]:
        """Load a build under a name that no client knows, and unload it at the end.

        Entering raises an error of our tree, in the server's own words, when the build does not load.
        """
        ...
