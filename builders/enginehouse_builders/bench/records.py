"""What was seen of each request, and the latencies that follow from it. Times are seconds from the start of the run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROUND_S: Final = 6  # places: microseconds


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Latencies count from ``intended_at_s``: a late generator or a full server never flatters them.

    ``piece_at_s`` are the arrivals of pieces with text: one token each, unless the server sends several together.
    """

    index: int
    intended_at_s: float
    sent_at_s: float
    ended_at_s: float
    piece_at_s: tuple[float, ...] = ()
    is_warmup: bool = False
    is_cancelled: bool = False  # by the workload, on purpose
    error_kind: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_cached_input_tokens: int | None = None
    num_output_tokens: int | None = None
    cost: Decimal | None = None
    currency: str | None = None
    energy_joules: float | None = None
    is_energy_estimated: bool | None = None
    build_id: str | None = None
    tenant: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer came."""
        return self.error_kind is None and not self.is_cancelled

    @property
    def num_tokens_seen(self) -> int:
        """Output tokens as the server counts them, else the pieces that came."""
        return len(self.piece_at_s) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from the intended send to the first text."""
        return self.piece_at_s[0] - self.intended_at_s if self.piece_at_s else None

    @property
    def e2e_s(self) -> float | None:
        """From the intended send to the end of a whole answer."""
        return self.ended_at_s - self.intended_at_s if self.is_complete else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between pieces, as a reader sees them."""
        return tuple(b - a for a, b in zip(self.piece_at_s, self.piece_at_s[1:], strict=False))

    @property
    def mean_itl_s(self) -> float | None:
        """Mean of the gaps."""
        gaps = self.itl_s
        return sum(gaps) / len(gaps) if gaps else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, of a whole answer, by the server's count of tokens."""
        if not self.is_complete or not self.piece_at_s or self.num_tokens_seen < 2:  # noqa: PLR2004 - a gap takes two
            return None
        return (self.piece_at_s[-1] - self.piece_at_s[0]) / (self.num_tokens_seen - 1)


def record_to_json(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values; fields at their default are left out."""
    values: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            values[field.name] = _plain(value)
    return values


def record_from_json(values: Mapping[str, Any]) -> RequestRecord:
    """Read what :func:`record_to_json` wrote; raises KeyError, TypeError or ArithmeticError for anything else."""
    known = dict(values)
    known["piece_at_s"] = tuple(float(at_s) for at_s in known.get("piece_at_s", ()))
    if known.get("cost") is not None:
        known["cost"] = Decimal(known["cost"])
    return RequestRecord(**known)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _ROUND_S)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Decimal) else value
