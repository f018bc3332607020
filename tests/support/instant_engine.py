"""The engine model with a runner that answers at once: what is left is everything but the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_backends.triton import engine_model

if TYPE_CHECKING:
    from typing_extensions import Self

    from enginehouse_backends.engine.step import StepPlan

_TOKEN_ID = 1000
_MAX_ROWS = 4096


class InstantLogits:
    """Rows that always prefer one token."""

    top_ids = np.full((_MAX_ROWS, 1), _TOKEN_ID, np.int32)
    top_values = np.zeros((_MAX_ROWS, 1), np.float32)
    log_sum_exp = np.zeros(_MAX_ROWS, np.float32)

    def full_row(self, row: int) -> np.ndarray[Any, Any]:
        """Return a row of zeros."""
        return np.zeros(InstantRunner.vocab_size, np.float32)


class InstantRunner:
    """Computes nothing."""

    num_blocks = 4096
    tokens_per_block = 32
    bytes_per_block = 1
    vocab_size = 49152

    @classmethod
    def load(cls, *_: Any, **__: Any) -> Self:
        """Return one, whatever the build."""
        return cls()

    def run(self, plan: StepPlan) -> InstantLogits:
        """Answer at once."""
        assert plan.num_logit_rows <= _MAX_ROWS
        return InstantLogits()


engine_model.OpenVinoRunner = InstantRunner  # type: ignore[assignment,misc] # the same shape, and nothing inside
TritonPythonModel = engine_model.TritonPythonModel

__all__ = ["TritonPythonModel"]
