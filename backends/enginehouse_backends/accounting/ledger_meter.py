"""The meter that writes to a ledger.

When the ledger is away the policy decides: `refuse` (no request runs unaccounted) or `serve`. What could not be written
is kept and written when the ledger is back.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from enginehouse_backends.accounting.debts import Debts
from enginehouse_backends.accounting.records import RequestTimes, Reservation, Settlement
from enginehouse_contract.errors import (
    DeadlineExceededError,
    EnginehouseError,
    LedgerUnavailableError,
    RequestCancelledError,
)
from enginehouse_contract.usage import TokenUsage

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import Self

    from enginehouse_backends.accounting.ledger import Ledger
    from enginehouse_backends.accounting.records import ComputeShare, RequestKey, UsageRecord
    from enginehouse_backends.front_door.generation import FinishReasonName
    from enginehouse_contract.settings import OnLedgerFailure

_LOGGER = logging.getLogger(__name__)
_DEFAULT_PROGRESS_PERIOD_S: Final = 1.0


class LedgerMeter:
    """Accounts for requests in a ledger. Thread-safe.

    Args:
        ledger: Where; closed with the meter.
        on_ledger_failure: Whether requests are refused or served while the ledger is away.
        progress_period_s: The counts of a running request become durable at most this often.
    """

    def __init__(
        self,
        ledger: Ledger,
        on_ledger_failure: OnLedgerFailure = "refuse",
        progress_period_s: float = _DEFAULT_PROGRESS_PERIOD_S,
    ) -> None:
        self.ledger = ledger
        self.on_ledger_failure = on_ledger_failure
        self.progress_period_s = progress_period_s
        self.debts = Debts(ledger)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("opened", "settled", "released", "refused", "unreserved", "abandoned", "failed"), 0
        )

    def open(
        self,
        *,
        tenant: str,
        request_id: str,
        model: str,
        build_id: str,
        upper_bound: TokenUsage,
        attempt: int | None = None,
        key_id: str = "",
    ) -> LedgerRequest:
        """See :class:`~enginehouse_backends.accounting.meter.Meter`."""
        reservation = Reservation(tenant, request_id, model, build_id, upper_bound, attempt, key_id)
        try:
            admission = self.ledger.reserve(reservation)
        except LedgerUnavailableError as error:
            if self.on_ledger_failure == "refuse":
                self.count("refused")
                self.debts.add_doubtful(reservation)
                raise
            _LOGGER.warning("serving request %s of tenant %s without a reservation: %s", request_id, tenant, error)
            self.count("unreserved")
            return LedgerRequest(_Open(self, replace(reservation, enforce_limits=False), None))
        except EnginehouseError:
            self.count("refused")
            raise
        self.count("opened")
        for sentence in admission.soft_limits:
            _LOGGER.warning("%s", sentence)
        return LedgerRequest(_Open(self, reservation, admission.key, admission.soft_limits))

    def count(self, fate: str) -> None:
        """Count one request's fate."""
        with self._lock:
            self._counts[fate] += 1

    def counts(self) -> dict[str, int]:
        """Return how many requests met which fate, and how many settlements are owed to the ledger now."""
        with self._lock:
            return {**self._counts, "owed": len(self.debts)}

    def close(self) -> None:
        """Write what is owed, and close the ledger."""
        self.debts.close()
        self.ledger.close()


@dataclass(eq=False, slots=True)
class _Open:
    """The state of a request's accounting, apart from its handle so that it outlives it."""

    meter: LedgerMeter
    reservation: Reservation
    key: RequestKey | None  # None: it could not be reserved yet
    soft_limits: tuple[str, ...] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)
    opened_ns: int = 0
    first_token_ns: int | None = None
    next_progress_ns: int = 0
    pending: Future[None] | None = None
    is_over: bool = False

    def settle(
        self, usage: TokenUsage, reason: FinishReasonName, times: RequestTimes, share: ComputeShare | None
    ) -> UsageRecord:
        """Write the settlement, and the reservation where it could not be written before."""
        if self.key is None:
            self.key = self.meter.ledger.reserve(self.reservation).key
        return self.meter.ledger.settle(Settlement(self.key, usage, reason, times, share))

    def abandon(self) -> None:
        """Settle what was dropped without being settled; never waits, since a garbage collector calls it."""
        if not self.is_over:
            self.is_over = True
            _LOGGER.error("request %s was dropped without being settled; settling it as an error", self.key)
            self.meter.count("abandoned")
            self.meter.debts.add(self.reservation, self.key, self.usage, "error", RequestTimes(), None)


class LedgerRequest:
    """One request attempt in a ledger. Its methods are called by one thread at a time."""

    def __init__(self, state: _Open) -> None:
        state.opened_ns = time.monotonic_ns()
        self._state = state
        self._lock = threading.Lock()
        self._record: UsageRecord | None = None
        self._finalizer = weakref.finalize(self, state.abandon)
        self._finalizer.atexit = False  # what is open at exit is recovered by the next process

    @property
    def key(self) -> RequestKey | None:
        """What the request is known by in the ledger; None while it could not be reserved."""
        return self._state.key

    @property
    def soft_limits(self) -> tuple[str, ...]:
        """See :class:`~enginehouse_backends.accounting.meter.MeteredRequest`."""
        return self._state.soft_limits

    def progress(self, usage: TokenUsage) -> None:
        """See :class:`~enginehouse_backends.accounting.meter.MeteredRequest`."""
        state, now_ns = self._state, time.monotonic_ns()
        state.usage = usage
        if state.first_token_ns is None and usage.num_output_tokens:
            state.first_token_ns = now_ns
        if state.key is None or now_ns < state.next_progress_ns or not (state.pending is None or state.pending.done()):
            return
        state.next_progress_ns = now_ns + int(state.meter.progress_period_s * 1e9)
        state.pending = state.meter.ledger.progress(state.key, usage)

    def settle(
        self,
        usage: TokenUsage,
        finish_reason: FinishReasonName,
        times: RequestTimes | None = None,
        share: ComputeShare | None = None,
    ) -> UsageRecord | None:
        """See :class:`~enginehouse_backends.accounting.meter.MeteredRequest`."""
        with self._lock:
            state = self._state
            if state.is_over:
                return self._record
            state.is_over = True
            times = times or self._measured_times(usage)
            try:
                self._record = state.settle(usage, finish_reason, times, share)
            except LedgerUnavailableError as error:
                state.meter.count("failed")
                state.meter.debts.add(state.reservation, state.key, usage, finish_reason, times, share)
                _LOGGER.warning("the settlement of request %s waits for the ledger: %s", state.key, error)
                if state.meter.on_ledger_failure == "refuse":
                    raise
            else:
                state.meter.count("settled")
            return self._record

    def release(self, reason: str) -> None:
        """See :class:`~enginehouse_backends.accounting.meter.MeteredRequest`."""
        with self._lock:
            state = self._state
            if state.is_over:
                return
            state.is_over = True
            state.meter.count("released")
            if state.key is None:
                return
            try:
                state.meter.ledger.release(state.key, reason)
            except LedgerUnavailableError:
                state.meter.debts.add_doubtful(state.reservation)

    def _measured_times(self, usage: TokenUsage) -> RequestTimes:
        state, now_ns = self._state, time.monotonic_ns()
        first_ns = state.first_token_ns or (now_ns if usage.num_output_tokens else None)
        return RequestTimes(None if first_ns is None else first_ns - state.opened_ns, now_ns - state.opened_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        reason: FinishReasonName = "error"
        if isinstance(error, RequestCancelledError):
            reason = "cancelled"
        elif isinstance(error, DeadlineExceededError):
            reason = "timeout"
        self.settle(self._state.usage, reason)
