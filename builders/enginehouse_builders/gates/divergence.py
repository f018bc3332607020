"""How far two builds' predictions are apart, from their logits over the same tokens.

The Kullback-Leibler divergence of the reference P from the build Q at one position is sum over the vocabulary of
P log(P / Q), in nats; perplexity is the exponential of the mean of -log Q(next token) over a text. Both as llama.cpp's
``llama-perplexity --kl-divergence`` reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_MEAN_NLL: Final = 700.0  # a float holds its exponential


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Tokens whose logits are compared: a prompt, then the reference's own greedy answer to it."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    is_text: bool  # whether the prompt is natural text, whose perplexity means something

    @property
    def num_answer_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Divergence:
    """Sums over positions, which add up over sequences."""

    num_positions: int = 0
    sum_kl: float = 0.0
    max_kl: float = 0.0
    num_answer_tokens: int = 0
    num_agreeing_tokens: int = 0
    num_text_tokens: int = 0
    sum_nll: float = 0.0
    sum_reference_nll: float = 0.0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(
            self.num_positions + other.num_positions,
            self.sum_kl + other.sum_kl,
            max(self.max_kl, other.max_kl),
            self.num_answer_tokens + other.num_answer_tokens,
            self.num_agreeing_tokens + other.num_agreeing_tokens,
            self.num_text_tokens + other.num_text_tokens,
            self.sum_nll + other.sum_nll,
            self.sum_reference_nll + other.sum_reference_nll,
        )

    @property
    def mean_kl(self) -> float:
        """Mean divergence of a position, in nats."""
        return self.sum_kl / max(self.num_positions, 1)

    @property
    def token_agreement(self) -> float:
        """Share of the reference's greedy tokens that the build would choose too."""
        return self.num_agreeing_tokens / max(self.num_answer_tokens, 1)

    @property
    def perplexity(self) -> float | None:
        """The build's on the text; None where there is no text."""
        return _perplexity(self.sum_nll, self.num_text_tokens)

    @property
    def reference_perplexity(self) -> float | None:
        """The reference's on the text; None where there is no text."""
        return _perplexity(self.sum_reference_nll, self.num_text_tokens)


def compare(
    sequence: ScoredSequence, build: NDArray[np.float32], reference: NDArray[np.float32] | None = None
) -> Divergence:
    """Compare logits, each [tokens, vocab], at every position of a sequence; finite ones only.

    Without a reference the divergence is that of the build from itself: 0, with its perplexity.
    """
    ids, num_prompt = np.array(sequence.token_ids), sequence.num_prompt_tokens
    answer_rows = np.arange(num_prompt - 1, len(ids) - 1)
    text_rows = np.arange(num_prompt - 1 if sequence.is_text else 0)
    _, log_sum_q = _softmax(build)
    sum_nll = float((log_sum_q[text_rows] - build[text_rows, ids[text_rows + 1]]).sum())
    kl, sum_reference_nll = np.zeros(1), sum_nll
    if reference is not None:
        shares, log_sum_p = _softmax(reference)
        kl = (shares * (reference - build)).sum(axis=1, dtype=np.float64) - (log_sum_p - log_sum_q)
        kl = np.maximum(kl, 0.0)  # rounding may leave it below 0
        sum_reference_nll = float((log_sum_p[text_rows] - reference[text_rows, ids[text_rows + 1]]).sum())
    return Divergence(
        num_positions=len(ids),
        sum_kl=float(kl.sum()),
        max_kl=float(kl.max()),
        num_answer_tokens=len(answer_rows),
        num_agreeing_tokens=int((build[answer_rows].argmax(axis=1) == ids[answer_rows + 1]).sum()),
        num_text_tokens=len(text_rows),
        sum_nll=sum_nll,
        sum_reference_nll=sum_reference_nll,
    )


def first_bad_position(logits: NDArray[np.float32]) -> int | None:
    """Return the first position whose logits hold NaN or infinity, or None."""
    bad = ~np.isfinite(logits).all(axis=1)
    return int(bad.argmax()) if bad.any() else None


def _perplexity(sum_nll: float, num_tokens: int) -> float | None:
    return exp(min(sum_nll / num_tokens, _MAX_MEAN_NLL)) if num_tokens else None


def _softmax(logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Return the shares, and the logarithm of the sum of exponentials of each row."""
    largest = logits.max(axis=1, keepdims=True)
    shares = np.exp(logits - largest)
    sums = shares.sum(axis=1, dtype=np.float64, keepdims=True)
    shares /= sums.astype(np.float32)
    return shares, (np.log(sums) + largest)[:, 0]
