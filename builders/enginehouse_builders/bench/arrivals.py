"""When requests arrive at a server that they do not wait for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from enginehouse_contract.errors import InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


def arrival_times_s(rate_per_s: float, burstiness: float, random: np.random.Generator) -> Iterator[float]:
    """Yield arrival times in seconds from 0, without end.

    Gaps are gamma-distributed with mean ``1 / rate_per_s`` and shape ``1 / burstiness``, so *burstiness* is the squared
    coefficient of variation of the gaps: 0 is a metronome, 1 a Poisson process, more comes in bursts.

    Raises :class:`InvalidRequestError` for a rate or burstiness that is not one.
    """
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise InvalidRequestError(refusal("rate", "must be above 0 requests per second", given=rate_per_s))
    if not (math.isfinite(burstiness) and burstiness >= 0):
        hint = "0 is regular, 1 is Poisson, more comes in bursts."
        raise InvalidRequestError(refusal("burstiness", "must be at least 0", given=burstiness, hint=hint))
    return _times_s(rate_per_s, burstiness, random)


def _times_s(rate_per_s: float, burstiness: float, random: np.random.Generator) -> Iterator[float]:
    at_s = 0.0
    while True:
        gap_s = 1 / rate_per_s if burstiness == 0 else float(random.gamma(1 / burstiness, burstiness / rate_per_s))
        at_s += gap_s
        yield at_s
