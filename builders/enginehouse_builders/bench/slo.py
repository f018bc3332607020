"""Service level objectives of single requests: ``ttft=200ms,itl=50ms``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from enginehouse_contract.errors import InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from enginehouse_builders.bench.records import RequestRecord

_METRICS: Final[dict[str, Callable[[RequestRecord], float | None]]] = {
    "ttft": lambda record: record.ttft_s,
    "itl": lambda record: record.mean_itl_s,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
}
_TERM: Final = re.compile(r"\s*(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds by metric: ``ttft``, ``itl`` (mean of a request's gaps), ``tpot``, ``e2e``."""

    limits_s: tuple[tuple[str, float], ...] = ()

    def is_met_by(self, record: RequestRecord) -> bool:
        """Whether a request was answered wholly and within every limit; an answer of one token has no gaps."""
        if not record.is_complete or record.ttft_s is None:
            return False
        values = ((_METRICS[name](record), limit_s) for name, limit_s in self.limits_s)
        return all(value is None or value <= limit_s for value, limit_s in values)


def parse_slo(text: str) -> Slo:
    """Read ``metric=limit`` terms, separated by commas; raises :class:`InvalidRequestError` for what is none.

    >>> parse_slo("ttft=200ms, e2e=1.5s").limits_s
    (('ttft', 0.2), ('e2e', 1.5))
    """
    limits: dict[str, float] = {}
    for term in text.split(","):
        match = _TERM.fullmatch(term)
        if match is None or match[1] not in _METRICS or match[1] in limits:
            hint = f"Write metric=limit once for each, such as ttft=200ms,itl=50ms; metrics: {', '.join(_METRICS)}."
            raise InvalidRequestError(refusal("slo", "is not readable", given=term.strip(), hint=hint))
        limits[match[1]] = float(match[2]) / (1000 if match[3] == "ms" else 1)
    return Slo(tuple(limits.items()))
