"""Setting drafts before a step and learning from it after: the engine's side of prompt lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from enginehouse_backends.speculation.controller import MAX_DRAFT_TOKENS, StepCostModel, choose_draft_lengths

if TYPE_CHECKING:
    from collections.abc import Iterable

    from enginehouse_backends.engine.generation import Generation
    from enginehouse_backends.engine.step import StepPlan

_PLAIN_STEP_PERIOD: Final = 24  # so many drafted steps, then one without, so that both costs stay fresh


class Drafting:
    """Chooses every generating sequence's drafts for the next step from measured acceptance and measured cost."""

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._cost = StepCostModel()
        self._num_drafted_steps = 0

    def propose(self, generations: Iterable[Generation]) -> None:
        """Set ``draft_token_ids`` of the sequences that generate; the scheduler cuts them to what fits."""
        candidates = [
            (generation.sequence, generation.proposer)
            for generation in generations
            if generation.proposer is not None and generation.sequence.num_uncomputed_tokens == 1
        ]
        if not candidates:
            return
        drafts = [
            proposer.propose(min(MAX_DRAFT_TOKENS, sequence.max_computed_tokens - sequence.num_tokens))
            for sequence, proposer in candidates
        ]
        lengths = choose_draft_lengths(
            [proposer.acceptance for _, proposer in candidates],
            [len(draft) for draft in drafts],
            self._cost.predict,
            self._max_step_tokens - len(candidates),
        )
        if not any(lengths):
            return
        self._num_drafted_steps += 1
        if self._num_drafted_steps % _PLAIN_STEP_PERIOD == 0:
            return
        for (sequence, _), draft, length in zip(candidates, drafts, lengths, strict=True):
            sequence.draft_token_ids = draft[:length]

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        """Learn a step's cost, if it held nothing but generating sequences: prompts cost differently."""
        if len(plan.slices) == sum(piece.num_logit_rows > 0 for piece in plan.slices) and (
            plan.num_tokens == plan.num_logit_rows
        ):
            self._cost.observe(plan.num_tokens, duration_s)
