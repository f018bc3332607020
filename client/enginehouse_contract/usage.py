"""What one request attempt used: disjoint token classes, and what is billed of them.

::

    prompt                    = input_uncached + input_cached
    billed                    = input_uncached, input_cached, output
    cost but never billed     = draft_rejected (verified in vain), recomputed (after a preemption, in a later round of
                                drafts, or a prompt again for its next sequence), discarded (generated past the end
                                that a stop string in the text made)
    computed by the engine    = input_uncached + output + discarded - 1 + draft_rejected + recomputed

(The last generated token of a sequence is never fed back, hence the 1, once an output token exists.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request attempt by class; the classes are disjoint."""

    num_input_uncached_tokens: int = 0
    num_input_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_rejected_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_discarded_tokens: int = 0

    def __post_init__(self) -> None:
        assert min(self.num_input_uncached_tokens, self.num_input_cached_tokens, self.num_output_tokens) >= 0, self
        assert min(self.num_draft_rejected_tokens, self.num_recomputed_tokens, self.num_discarded_tokens) >= 0, self

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the prompt, cached or not (OpenTelemetry's ``gen_ai.usage.input_tokens``)."""
        return self.num_input_uncached_tokens + self.num_input_cached_tokens

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.num_input_uncached_tokens + other.num_input_uncached_tokens,
            self.num_input_cached_tokens + other.num_input_cached_tokens,
            self.num_output_tokens + other.num_output_tokens,
            self.num_draft_rejected_tokens + other.num_draft_rejected_tokens,
            self.num_recomputed_tokens + other.num_recomputed_tokens,
            self.num_discarded_tokens + other.num_discarded_tokens,
        )
