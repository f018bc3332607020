"""What could not be written while the ledger was away: kept in memory, written when it is back.

A process that dies meanwhile loses what it owed; its open holds are then settled from their last durable counts.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from enginehouse_backends.accounting.records import RequestTimes, Settlement
from enginehouse_contract.errors import EnginehouseError, LedgerUnavailableError

if TYPE_CHECKING:
    from enginehouse_backends.accounting.ledger import Ledger
    from enginehouse_backends.accounting.records import ComputeShare, RequestKey, Reservation
    from enginehouse_backends.front_door.generation import FinishReasonName
    from enginehouse_contract.usage import TokenUsage

_LOGGER = logging.getLogger(__name__)
_RETRY_PERIOD_S: Final = 1.0


class _Debt(NamedTuple):
    reservation: Reservation
    key: RequestKey | None
    usage: TokenUsage
    finish_reason: FinishReasonName
    times: RequestTimes
    share: ComputeShare | None


class Debts:
    """Owed settlements, retried in a thread that lives only while there are any."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.RLock()  # a garbage collector may add while this thread holds it
        self._owed: deque[_Debt] = deque()
        self._doubtful: set[str] = set()  # claims of refused reservations that may have been written after all
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._owed)

    def add(
        self,
        reservation: Reservation,
        key: RequestKey | None,
        usage: TokenUsage,
        finish_reason: FinishReasonName,
        times: RequestTimes,
        share: ComputeShare | None,
    ) -> None:
        """Owe a settlement, and its reservation where ``key`` is None."""
        with self._lock:
            self._owed.append(_Debt(reservation, key, usage, finish_reason, times, share))
            self._wake()

    def add_doubtful(self, reservation: Reservation) -> None:
        """Owe the release of a reservation that failed: the failure may have come after it was durable."""
        with self._lock:
            self._doubtful.add(reservation.claim)
            self._wake()

    def close(self) -> None:
        """Try once more, and log what stays unpaid."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        for debt in self._owed:
            _LOGGER.critical("never written to the ledger: %s", debt)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ledger-debts", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            is_last_try = self._closing.is_set()
            self._pay()
            with self._lock:
                if not (self._owed or self._doubtful):
                    self._thread = None
                    return
            if is_last_try:
                return
            self._closing.wait(_RETRY_PERIOD_S)

    def _pay(self) -> None:
        try:
            with self._lock:
                claims = sorted(self._doubtful)
            if claims:
                self._ledger.release_claims(claims, "the ledger failed while it was reserved")
                with self._lock:
                    self._doubtful.difference_update(claims)
            while self._owed:
                self._pay_one(self._owed[0])
                self._owed.popleft()
        except LedgerUnavailableError as error:
            _LOGGER.warning("%d settlements wait for the ledger: %s", len(self._owed), error)

    def _pay_one(self, debt: _Debt) -> None:
        try:
            key = debt.key or self._ledger.reserve(debt.reservation).key
            self._ledger.settle(Settlement(key, debt.usage, debt.finish_reason, debt.times, debt.share))
        except LedgerUnavailableError:
            raise
        except EnginehouseError:
            _LOGGER.exception("the ledger refused what it was owed: %s", debt)
