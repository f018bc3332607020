"""What the front door holds of a request's accounting: opened before it runs, settled exactly once however it ends.

::

    meter.open(...) -> handle        the reservation is durable, or the request is refused
    handle.progress(usage)           now and then; what a crash would be settled from
    handle.settle(usage, reason)     once; leaving the `with` block or dropping the handle settles it as an error

`ledger_meter.py` does it; where accounting is off, :class:`NoMeter` does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Self

    from enginehouse_backends.accounting.records import ComputeShare, RequestTimes, UsageRecord
    from enginehouse_backends.front_door.generation import FinishReasonName
    from enginehouse_contract.usage import TokenUsage


class MeteredRequest(Protocol):
    """One request attempt being accounted for. Usable as a context manager."""

    @property
    def soft_limits(self) -> tuple[str, ...]:
        """A sentence for each soft limit that this request passed."""
        ...

    def progress(self, usage: TokenUsage) -> None:
        """Say what was used so far; does not wait."""
        ...

    def settle(
        self,
        usage: TokenUsage,
        finish_reason: FinishReasonName,
        times: RequestTimes | None = None,
        share: ComputeShare | None = None,
    ) -> UsageRecord | None:
        """End the request's accounting: the first call counts, others repeat its answer.

        Durable when it returns a record. None: accounting is off, or the ledger is away and the policy is to serve.
        Times are measured here unless given.

        Raises:
            LedgerUnavailableError: The ledger is away and the policy is to refuse; it is settled when it is back.
        """
        ...

    def release(self, reason: str) -> None:
        """End the accounting of a request that never started: nothing is billed or counted."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None: ...


class Meter(Protocol):
    """Opens the accounting of requests."""

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
    ) -> MeteredRequest:
        """Reserve a request's upper bound; ``attempt`` None takes the next free number of this request id.

        Raises:
            BudgetExceededError: A budget has no room.
            ConfigurationError: The model has no price, and the price book wants one.
            InvalidRequestError: A name is too long or holds control characters.
            LedgerConflictError: This attempt was reserved before with other content.
            LedgerUnavailableError: The ledger is away, and the policy is to refuse.
        """
        ...

    def counts(self) -> dict[str, int]:
        """Return how many requests met which fate, by name."""
        ...

    def close(self) -> None:
        """Write what is owed, and close the ledger."""
        ...


class NoMeter:
    """Accounting is off: nothing is written, nothing is refused."""

    soft_limits: tuple[str, ...] = ()

    def open(self, **_: object) -> NoMeter:
        """Accept."""
        return self

    def progress(self, usage: TokenUsage) -> None:
        """Ignore."""

    def settle(self, *_: object, **__: object) -> None:
        """Ignore."""

    def release(self, reason: str) -> None:
        """Ignore."""

    def counts(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
