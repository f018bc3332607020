"""Group commit: one thread takes whatever operations wait, applies them in one transaction, and answers after COMMIT.

While one commit waits for the disk the next operations queue up, so batches grow exactly as fast as they must.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from enginehouse_contract.errors import LedgerUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OperationT = TypeVar("OperationT")
Outcome = object
"""What an operation comes to: its value, or an exception that refuses it without harm to the others."""

_MAX_BATCH: Final = 1000
_MAX_TRIES_ALONE: Final = 3  # another process may win the same key meanwhile; then the next try sees its entry


class _Waiting(NamedTuple, Generic[OperationT]):
    operation: OperationT
    future: Future[Any]


class GroupCommit(Generic[OperationT]):
    """Queues operations for *apply*, which runs a batch in one transaction and returns one outcome for each.

    *apply* raises :class:`LedgerUnavailableError` when the database is away: the whole batch fails. After any other
    exception each operation runs again in a transaction of its own, so that only the guilty one fails.
    """

    def __init__(self, apply: Callable[[Sequence[OperationT]], Sequence[Outcome]]) -> None:
        self._apply = apply
        self._condition = threading.Condition()
        self._waiting: deque[_Waiting[OperationT]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, operation: OperationT) -> Future[Any]:
        """Queue an operation; the future ends after its transaction has, one way or the other."""
        waiting = _Waiting(operation, Future())
        with self._condition:
            if self._is_closed:
                raise LedgerUnavailableError("the ledger is closed.")
            self._waiting.append(waiting)
            self._condition.notify()
        return waiting.future

    def close(self) -> None:
        """Commit what waits and end the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._take():
            self._commit(batch)

    def _take(self) -> list[_Waiting[OperationT]]:
        with self._condition:
            while not self._waiting and not self._is_closed:
                self._condition.wait()
            return [self._waiting.popleft() for _ in range(min(_MAX_BATCH, len(self._waiting)))]

    def _commit(self, batch: list[_Waiting[OperationT]]) -> None:
        try:
            outcomes = self._apply([waiting.operation for waiting in batch])
        except LedgerUnavailableError as error:
            outcomes = [error] * len(batch)
        except Exception:  # noqa: BLE001 - the guilty operation shows itself when it runs alone
            outcomes = [self._apply_alone(waiting.operation) for waiting in batch]
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                waiting.future.set_exception(outcome)
            else:
                waiting.future.set_result(outcome)

    def _apply_alone(self, operation: OperationT) -> Outcome:
        for num_tries in range(1, _MAX_TRIES_ALONE + 1):
            try:
                return self._apply([operation])[0]
            except LedgerUnavailableError as error:
                return error
            except Exception as error:  # noqa: BLE001 - it goes to whoever waits for it
                if num_tries == _MAX_TRIES_ALONE:
                    return error
        raise AssertionError("the last try returns")
