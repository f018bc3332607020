"""The most likely tokens of a row in order, and proof that they suffice to draw from the whole vocabulary.

A step answers the K largest logits of a row and the log of the sum of all exponentials. Most tokens can be chosen from
these alone, which saves reading, and above all sorting, a whole row. :class:`Candidates` knows how much weight the
tokens left out can have at least and at most; a draw that comes out the same under both bounds is certain, any other
is left to the whole row. So the token never depends on which of them was read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from enginehouse_backends.engine.logits_processor import LogitsProcessor
    from enginehouse_backends.engine.step import StepLogits

_LOG_SUM_EXP_ERROR = 1e-4  # absolute; computed in the graph in single precision (2e-5 was measured)
_ROUNDING = 1e-9  # relative; of sums of a vocabulary's weights in different orders
_LIKELY = math.exp(-10.0)  # weight, beside 1 of the most likely token
_JUST_BELOW = 1 - 1e-12  # top_p is reached by a sum that equals it but for rounding
_MAX_EXPONENT = 700.0  # exp() of more overflows


class Candidates(NamedTuple):
    """Tokens by falling processed logit, ties by id."""

    token_ids: NDArray[np.int64]
    weights: NDArray[np.float64]  # exp((logit - largest) / temperature)
    num_certain: int  # so many lead the whole vocabulary, too
    min_rest: float = 0.0  # bounds on the weight of all tokens left out
    max_rest: float = 0.0

    def limited_to(self, top_k: int) -> Candidates | None:
        """Return the *top_k* first, as all there is; None where they are not certain."""
        if top_k > self.num_certain:
            return None
        return Candidates(self.token_ids[:top_k], self.weights[:top_k], min(top_k, len(self.weights)))

    def nucleus(self, top_p: float) -> Candidates | None:
        """Return the fewest first that hold *top_p* of the weight (Holtzman et al. 2019); None where not certain."""
        if top_p >= 1.0:
            return None if self.max_rest else self
        cumulative = np.cumsum(self.weights)
        target = top_p * _JUST_BELOW
        index = int(np.searchsorted(cumulative, target * (cumulative[-1] + self.min_rest)))
        at_most = int(np.searchsorted(cumulative, target * (cumulative[-1] + self.max_rest)))
        return self.limited_to(index + 1) if index == at_most else None

    def draw(self, top_p: float, uniform: float) -> int | None:
        """Return the token at *uniform*, in [0, 1), of the distribution cut to *top_p*; None where not certain."""
        kept = self if top_p >= 1.0 else self.nucleus(top_p)
        if kept is None:
            return None
        cumulative = np.cumsum(kept.weights)
        index = int(np.searchsorted(cumulative, uniform * (cumulative[-1] + kept.min_rest), side="right"))
        if kept.max_rest:
            at_most = int(np.searchsorted(cumulative, uniform * (cumulative[-1] + kept.max_rest), side="right"))
            if index != at_most or index >= kept.num_certain:
                return None
        return int(kept.token_ids[index])


def candidates_of_top(
    logits: StepLogits, row: int, processor: LogitsProcessor, temperature: float, vocab_size: int
) -> Candidates | None:
    """Return the candidates among a row's K largest logits; None where processing may raise others above them.

    Every token outside is at most the K-th value, and processing only lowers it: what stays above that is certain.
    """
    if processor.may_raise:
        return None
    ids = logits.top_ids[row].astype(np.int64)
    values = logits.top_values[row].astype(np.float64)
    log_sum_exp = float(logits.log_sum_exp[row])
    floor = float(values[-1])
    share = float(np.exp(values - log_sum_exp).sum())
    if not processor.is_identity:
        processor.apply(ids, values)
    if not (processor.is_identity and (values[1:] < values[:-1]).all()):
        order = np.lexsort((ids, -values))
        ids, values = ids[order], values[order]
    largest = float(values[0])
    num_rest = vocab_size - len(ids)
    num_certain = int(np.count_nonzero(values > floor)) if num_rest else len(ids)
    if not num_certain or largest == -math.inf:
        return None
    weights = np.exp((values - largest) / temperature)
    if not num_rest:
        return Candidates(ids, weights, num_certain)
    min_rest, max_rest = _rest(1 - share, log_sum_exp - largest, floor - largest, 1 / temperature, num_rest)
    return Candidates(ids, weights, num_certain, min_rest if processor.is_identity else 0.0, max_rest)


def _rest(share: float, log_sum_exp: float, floor: float, exponent: float, num_tokens: int) -> tuple[float, float]:
    """Bound the sum of y**exponent over *num_tokens* tokens that have *share* of the sum of y over all tokens.

    With y = exp(logit - largest), t their sum, Y = exp(floor) >= y and a = *exponent* = 1 / temperature, it lies
    between Y**(a - 1) * t, as each y**a is y * y**(a - 1), and n**(1 - a) * t**a (Jensen). The former is the larger
    for a > 1. *log_sum_exp* is the log of the sum of all y; it, and so the share, has a small error.
    """
    bounds = []
    for error, choose in ((-_LOG_SUM_EXP_ERROR, min), (_LOG_SUM_EXP_ERROR, max)):
        log_sum = math.log(share + error) + log_sum_exp + error if share + error > 0.0 else -math.inf
        by_floor = floor * (exponent - 1) + log_sum
        by_mean = (1 - exponent) * math.log(num_tokens) + exponent * log_sum
        bounds.append(math.exp(min(choose(by_floor, by_mean), _MAX_EXPONENT)))
    return bounds[0], bounds[1]


def k_largest(values: NDArray[np.float64], temperature: float, top_k: int) -> Candidates:
    """Return the *top_k* first of a whole row of processed logits, as all there is."""
    if top_k == 1:
        ids = np.array([values.argmax()])
    elif top_k < len(values):
        threshold = np.partition(values, len(values) - top_k)[len(values) - top_k]
        ids = _in_order(values, np.flatnonzero(values >= threshold))[:top_k]
    else:
        ids = _in_order(values, np.arange(len(values)))
    return Candidates(ids, np.exp((values[ids] - values[ids[0]]) / temperature), len(ids))


def likely_then_all(values: NDArray[np.float64], temperature: float) -> Iterator[Candidates]:
    """Yield the likely tokens of a whole row of processed logits, which are few to sort, and then all of them."""
    weights = np.exp((values - values.max()) / temperature)
    mass = float(weights.sum())
    ids = _in_order(values, np.flatnonzero(weights >= _LIKELY))
    kept = weights[ids]
    rest, error = mass - float(kept.sum()), mass * _ROUNDING
    yield Candidates(ids, kept, len(ids), max(0.0, rest - error), rest + error)
    ids = _in_order(values, np.arange(len(values)))
    yield Candidates(ids, weights[ids], len(ids))


def _in_order(values: NDArray[np.float64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort rising *ids* by falling value, ties by id."""
    falling = -values[ids]
    order = np.argsort(falling)
    found = falling[order]
    if (found[1:] == found[:-1]).any():
        order = np.argsort(falling, kind="stable")  # many times slower
    ordered: NDArray[np.int64] = ids[order]
    return ordered
