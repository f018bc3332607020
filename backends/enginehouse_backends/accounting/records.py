"""What is written to the ledger and read back: plain values, checked where they are made.

::

    Reservation --reserve--> Admission      before the request runs: its upper bound is held against the budgets
    Settlement  --settle---> UsageRecord    after it: what it used, priced, once
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from enginehouse_contract.errors import InvalidRequestError, refusal

if TYPE_CHECKING:
    from enginehouse_backends.front_door.generation import FinishReasonName
    from enginehouse_contract.money import Pico
    from enginehouse_contract.usage import TokenUsage

MAX_NAME_BYTES: Final = 256
MAX_BIGINT: Final = 2**63 - 1
"""The largest integer either database stores: 9.2 million units of a currency in pico-units."""


class RequestKey(NamedTuple):
    """What a request attempt is known by."""

    tenant: str
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """The most a request may use. ``attempt`` None takes the next free number of this request id."""

    tenant: str
    request_id: str
    model: str
    build_id: str
    upper_bound: TokenUsage
    attempt: int | None = None
    key_id: str = ""  # the tenant's API key, by name
    enforce_limits: bool = True  # False writes down what was admitted while the ledger was away
    claim: str = field(default_factory=lambda: uuid.uuid4().hex)  # tells a repeated call from another request

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant)
        check_name("request_id", self.request_id)
        check_name("model", self.model)
        check_name("build_id", self.build_id, may_be_empty=True)
        check_name("key_id", self.key_id, may_be_empty=True)
        check_count("attempt", 1 if self.attempt is None else self.attempt)


@dataclass(frozen=True, slots=True)
class Admission:
    """A reservation that is durable. ``amount`` None: the model has no price, and the price book lets it run."""

    key: RequestKey
    amount: Pico | None
    is_replay: bool = False
    soft_limits: tuple[str, ...] = ()  # one sentence for each soft limit that is passed


@dataclass(frozen=True, slots=True)
class ComputeShare:
    """A request's part of the machine: energy in microjoules and time in ns, split per step by tokens computed."""

    energy_uj: int = 0
    machine_ns: int = 0
    is_estimated: bool = False  # the energy is declared, not measured

    def __add__(self, other: ComputeShare) -> ComputeShare:
        return ComputeShare(
            self.energy_uj + other.energy_uj,
            self.machine_ns + other.machine_ns,
            self.is_estimated or other.is_estimated,
        )


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """How long a request took from its reservation on, in ns; None where it never came so far."""

    time_to_first_token_ns: int | None = None
    duration_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a request attempt used in the end."""

    key: RequestKey
    usage: TokenUsage
    finish_reason: FinishReasonName
    times: RequestTimes = RequestTimes()
    share: ComputeShare | None = None
    is_recovered: bool = False  # settled from its last durable count after its process died


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """One settled request attempt. Money is None where the model has no price, which is not 0."""

    key: RequestKey
    key_id: str
    model: str
    build_id: str
    usage: TokenUsage
    finish_reason: FinishReasonName
    amount: Pico | None
    currency: str | None
    book_id: str | None
    unit_prices: tuple[str, str, str] | None  # input, cached input, output; per million tokens, as decimal strings
    times: RequestTimes
    share: ComputeShare | None
    reserved_at_ns: int  # Unix time
    settled_at_ns: int  # Unix time, never before reserved_at_ns
    is_recovered: bool = False

    def says(self, settlement: Settlement) -> bool:
        """Whether *settlement* would have written just this record."""
        told = (settlement.usage, settlement.finish_reason, settlement.times, settlement.share)
        return told == (self.usage, self.finish_reason, self.times, self.share)


def check_name(field: str, name: str, *, may_be_empty: bool = False) -> None:
    """Raise :class:`InvalidRequestError` unless *name* is printable text of at most 256 bytes."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > MAX_NAME_BYTES or not (name or may_be_empty):
        raise InvalidRequestError(refusal(field, "has a bad length", limit=f"1 to {MAX_NAME_BYTES} bytes", given=size))
    if not name.isprintable():
        raise InvalidRequestError(refusal(field, "holds control characters", given=repr(name)))


def check_count(field: str, count: int) -> None:
    """Raise :class:`InvalidRequestError` unless *count* is at least 1 and can be stored."""
    if not 1 <= count <= MAX_BIGINT:
        raise InvalidRequestError(refusal(field, "is out of range", limit=f"1 to {MAX_BIGINT}", given=count))
