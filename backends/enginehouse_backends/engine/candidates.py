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
    from numpy.typing import NDArray

    from enginehouse_backends.engine.logits_processor import LogitsProcessor
    from enginehouse_backends.engine.step import StepLogits

_LOG_SUM_EXP_ERROR = 5e-5  # absolute; computed in the graph in single precision (1e-5 was measured)
_ROUNDING = 1e-9  # relative; of sums of a vocabulary's weights in different orders
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


def candidates_of_row(values: NDArray[np.float64], temperature: float, count: int) -> Candidates:
    """Return the *count* first candidates of a whole row of processed logits, of which one at least is finite."""
    ids = _largest(values, count)
    weights = np.exp((values - values[ids[0]]) / temperature)
    kept = weights[ids]
    if len(ids) == len(values):
        return Candidates(ids, kept, len(ids))
    mass = float(weights.sum())
    rest, error = mass - float(kept.sum()), mass * _ROUNDING
    return Candidates(ids, kept, len(ids), max(0.0, rest - error), rest + error)


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Ids of the *count* largest values, falling, ties by id."""
    if count == 1:
        return np.array([values.argmax()])
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    ids = np.flatnonzero(values >= threshold).astype(np.int64)
    ordered: NDArray[np.int64] = ids[np.argsort(-values[ids], kind="stable")]
    return ordered[:count]
