"""The ledger: what was reserved, used and billed, exactly once, durable before anyone is told.

::

    caller threads --operation--> [group commit: one writer thread, one transaction a batch] --COMMIT--> futures

Every operation may be repeated: the same key with the same content changes nothing, with other content it is refused.
What it does not cover: what a request used (`meter.py`), sums of it (`views.py`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from sqlalchemy import delete, select

from enginehouse_backends.accounting import owners
from enginehouse_backends.accounting.budgets import Budget, lock_budgets
from enginehouse_backends.accounting.database import connect, failures_in_words, reading
from enginehouse_backends.accounting.group_commit import GroupCommit
from enginehouse_backends.accounting.price_list import PriceList, add_price_book
from enginehouse_backends.accounting.records import RequestKey, Reservation, Settlement
from enginehouse_backends.accounting.reserving import Progress, progress, reserve
from enginehouse_backends.accounting.rows import find_entries, record_of, usage_of
from enginehouse_backends.accounting.schema import budgets, holds, machine_days, migrate
from enginehouse_backends.accounting.settling import settle
from enginehouse_backends.accounting.upsert import insert_or_add, insert_or_replace
from enginehouse_backends.accounting.windows import utc_day
from enginehouse_backends.accounting.withdrawing import Withdrawal, withdraw
from enginehouse_contract.errors import EnginehouseError, LedgerUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sqlalchemy import Connection
    from typing_extensions import Self

    from enginehouse_backends.accounting.budgets import BudgetsByTenant
    from enginehouse_backends.accounting.price_book import PriceBook
    from enginehouse_backends.accounting.records import Admission, UsageRecord
    from enginehouse_contract.usage import TokenUsage

T = TypeVar("T")


class MachineTime(NamedTuple):
    """How long a machine was up since the last such report, and the energy that no request used."""

    machine: str
    uptime_ns: int
    idle_energy_uj: int = 0
    is_estimated: bool = False


_Operation = Reservation | Progress | Settlement | Withdrawal | MachineTime


class Ledger:
    """One ledger, opened by this process. Thread-safe; close it (or use it as a context manager) to end its thread.

    Args:
        url: ``sqlite:///path`` or ``postgresql://...``.
        owner: Names this process in its holds, for :meth:`recover`.
        clock: Unix time in ns.
        may_be_away: Open it later, with the first operation that finds it, when it cannot be opened now.

    Raises:
        ConfigurationError: The URL is wrong, or the ledger is newer than this program.
        LedgerUnavailableError: It cannot be opened.
    """

    def __init__(
        self,
        url: str,
        owner: str | None = None,
        clock: Callable[[], int] = time.time_ns,
        *,
        may_be_away: bool = False,
    ) -> None:
        self.database = connect(url)
        self._is_ready = False
        try:
            self._prepare()
        except EnginehouseError as error:
            if not (may_be_away and isinstance(error, LedgerUnavailableError)):
                self.database.dispose()
                raise
        self.owner = owners.this_process() if owner is None else owner
        self._clock = clock
        self._books = PriceList()
        self._commits: GroupCommit[_Operation] = GroupCommit(self._apply)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Commit what waits, and let go of the database."""
        self._commits.close()
        self.database.dispose()

    # ---- requests ----

    def reserve(self, reservation: Reservation) -> Admission:
        """Hold a request's upper bound; durable when it returns.

        Raises:
            BudgetExceededError: A budget has no room for it; nothing is held.
            ConfigurationError: Its model has no price, and the price book wants one.
            LedgerConflictError: The same attempt was reserved with other content.
            LedgerUnavailableError: It could not be made durable.
        """
        return cast("Admission", self._commits.submit(reservation).result())

    def progress(self, key: RequestKey, usage: TokenUsage) -> Future[None]:
        """Make the counts of a running request durable, soon; does not wait."""
        return self._commits.submit(Progress(key, usage, self.owner))

    def settle(self, settlement: Settlement) -> UsageRecord:
        """End a hold with what was used; durable when it returns.

        Raises:
            LedgerConflictError: It was settled with other content, or has no open reservation.
            LedgerUnavailableError: It could not be made durable; settle again.
        """
        return self.settle_soon(settlement).result()

    def settle_soon(self, settlement: Settlement) -> Future[UsageRecord]:
        """As :meth:`settle`, without waiting."""
        return self._commits.submit(settlement)

    def release(self, key: RequestKey, reason: str) -> None:
        """End the hold of a request that never started: nothing is billed, and it does not count as a request."""
        self._commits.submit(Withdrawal(key, "release", reason)).result()

    def release_claims(self, claims: Sequence[str], reason: str) -> None:
        """Release the holds that these calls of :meth:`reserve` left, although they failed."""
        with reading(self.database) as connection:
            chosen = holds.c.claim.in_(claims)
            keys = connection.execute(select(holds.c.tenant, holds.c.request_id, holds.c.attempt).where(chosen)).all()
        for key in keys:
            self.release(RequestKey(*key), reason)

    def reverse(self, key: RequestKey, reason: str) -> None:
        """Take a settlement back, by an entry of its own; the request may be billed again as its next attempt."""
        self._commits.submit(Withdrawal(key, "reversal", reason)).result()

    def recover(self, is_owner_alive: Callable[[str], bool] = owners.is_alive) -> list[UsageRecord]:
        """Settle every hold of a dead process from its last durable counts; the records say so."""
        with reading(self.database) as connection:
            rows = connection.execute(select(holds)).mappings().all()
        dead = {owner for owner in {row["owner"] for row in rows} - {self.owner} if not is_owner_alive(owner)}
        futures = [
            self.settle_soon(
                Settlement(
                    RequestKey(row["tenant"], row["request_id"], row["attempt"]),
                    usage_of(row),
                    "error",
                    is_recovered=True,
                )
            )
            for row in rows
            if row["owner"] in dead
        ]
        return [future.result() for future in futures]

    def record_machine_time(self, machine_time: MachineTime) -> None:
        """Add to how long a machine was up, for the allocation of its cost; durable when it returns."""
        self._commits.submit(machine_time).result()

    def find(self, key: RequestKey) -> UsageRecord | None:
        """Return the settlement of a request attempt."""
        with reading(self.database) as connection:
            row = find_entries(connection, "settlement", [key]).get(key)
            return None if row is None else record_of(row, PriceList.load(connection))

    # ---- what an administrator sets ----

    def set_budget(self, budget: Budget) -> None:
        """Set the limits of a tenant (or one of its keys) in a window; what was spent in it before counts."""
        with failures_in_words(self.database), self.database.begin() as connection:
            insert_or_replace(connection, budgets, budget.to_row())

    def remove_budget(self, tenant: str, key_id: str, window: str) -> bool:
        """Remove limits; return whether there were any."""
        which = (budgets.c.tenant == tenant, budgets.c.key_id == key_id, budgets.c.window == window)
        with failures_in_words(self.database), self.database.begin() as connection:
            return connection.execute(delete(budgets).where(*which)).rowcount > 0

    def budgets(self) -> list[Budget]:
        """Return every budget."""
        with reading(self.database) as connection:
            rows = connection.execute(select(budgets).order_by(*budgets.primary_key))
            return [Budget.from_row(row) for row in rows]

    def add_price_book(self, book: PriceBook) -> None:
        """Add a price book; running servers use it from its date on.

        Raises:
            ConfigurationError: Another book has the same date, or the ledger has another currency.
        """
        with failures_in_words(self.database), self.database.begin() as connection:
            add_price_book(connection, book)

    def price_list(self) -> PriceList:
        """Return the price books as they are now."""
        with reading(self.database) as connection:
            return PriceList.load(connection)

    # ---- writer thread ----

    def _prepare(self) -> None:
        """Bring the tables up to date, once."""
        if not self._is_ready:
            with failures_in_words(self.database):
                migrate(self.database)
            self._is_ready = True

    def _apply(self, batch: Sequence[_Operation]) -> Sequence[object]:
        self._prepare()
        with failures_in_words(self.database), self.database.begin() as connection:
            return self._post(connection, batch)

    def _post(self, connection: Connection, batch: Sequence[_Operation]) -> list[object]:
        """Write a batch kind by kind: what a caller queued last for one request comes last."""
        self._books.refresh(connection)
        posts = _Posts(connection, self._books, lock_budgets(connection, _tenants(batch)), self.owner, self._clock())
        positions: dict[type, list[int]] = defaultdict(list)
        for position, operation in enumerate(batch):
            positions[type(operation)].append(position)
        outcomes: list[object] = [None] * len(batch)
        for kind, post in (
            (Reservation, posts.reserve),
            (Progress, posts.progress),
            (Settlement, posts.settle),
            (Withdrawal, posts.withdraw),
            (MachineTime, posts.add_machine_times),
        ):
            if chosen := positions.get(kind):
                answers = post([cast("Any", batch[position]) for position in chosen])
                for position, answer in zip(chosen, answers, strict=True):
                    outcomes[position] = answer
        return outcomes


def _tenants(batch: Sequence[_Operation]) -> set[str]:
    keys = {it.key.tenant for it in batch if isinstance(it, (Settlement, Withdrawal))}
    return keys | {it.tenant for it in batch if isinstance(it, Reservation)}


class _Posts(NamedTuple):
    """One transaction of the writer thread, and what every kind of operation needs in it."""

    connection: Connection
    books: PriceList
    budgets: BudgetsByTenant
    owner: str
    at_ns: int

    def reserve(self, batch: Sequence[Reservation]) -> Sequence[object]:
        return reserve(self.connection, batch, self.books, self.budgets, self.owner, self.at_ns)

    def progress(self, batch: Sequence[Progress]) -> Sequence[object]:
        progress(self.connection, batch)
        return [None] * len(batch)

    def settle(self, batch: Sequence[Settlement]) -> Sequence[object]:
        return settle(self.connection, batch, self.books, self.budgets, self.at_ns)

    def withdraw(self, batch: Sequence[Withdrawal]) -> Sequence[object]:
        return withdraw(self.connection, batch, self.books, self.budgets, self.at_ns)

    def add_machine_times(self, batch: Sequence[MachineTime]) -> Sequence[object]:
        day = utc_day(self.at_ns)
        rows = [
            {
                "day": day,
                "machine": it.machine,
                "uptime_ns": it.uptime_ns,
                "idle_energy_uj": it.idle_energy_uj,
                "num_estimated": int(it.is_estimated),
            }
            for it in sorted(batch)
        ]
        insert_or_add(self.connection, machine_days, rows)
        return [None] * len(batch)
