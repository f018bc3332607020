"""The contract between planner and runner: one step, as plain data.

The planner (`scheduler.py`) makes a :class:`StepPlan`; the runner computes it and answers :class:`StepLogits`; the
sampler turns rows into tokens; the planner applies them. The runner knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import numpy as np
    from numpy.typing import NDArray

    from enginehouse_backends.engine.request import SequenceId

BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that one step computes.

    ::

        positions   0 ........ num_past_tokens ........ num_past_tokens + len(token_ids)
                    [ KV in the pool           )[ computed in this step               )
        rows                                     ...[ the last num_logit_rows of them: logits wanted )
    """

    sequence_id: SequenceId
    token_ids: Seq[int]
    num_past_tokens: int
    block_ids: Seq[BlockId]  # cover num_past_tokens + len(token_ids) positions, in order
    num_logit_rows: int  # 0 while the prompt is not finished, 1 to sample, 1 + drafts to verify


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one forward pass needs."""

    slices: tuple[SequenceSlice, ...]
    block_copies: tuple[tuple[BlockId, BlockId], ...] = ()  # (source, destination), made before the pass

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(len(piece.token_ids) for piece in self.slices)

    @property
    def num_logit_rows(self) -> int:
        """Rows of logits the step answers, in the order of ``slices``."""
        return sum(piece.num_logit_rows for piece in self.slices)


class StepLogits(Protocol):
    """Logits of a step's wanted rows, in plan order. Valid until the runner's next call."""

    top_values: NDArray[np.float32]  # [rows, k], descending
    top_ids: NDArray[np.int32]  # [rows, k]
    log_sum_exp: NDArray[np.float32]  # [rows], over the whole vocabulary

    def full_row(self, row: int) -> NDArray[np.float32]:
        """Return a writable copy of one row, [vocab]."""
        ...


class Runner(Protocol):
    """Computes step plans over a paged KV cache of ``num_blocks`` blocks of ``tokens_per_block`` slots."""

    num_blocks: int
    tokens_per_block: int
    vocab_size: int

    def run(self, plan: StepPlan) -> StepLogits:
        """Copy ``plan.block_copies``, compute the slices, and answer the wanted rows."""
        ...
