"""Budgets and quotas: what a tenant, or one of its keys, may spend, ask and compute in a window of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import bindparam, select

from enginehouse_backends.accounting.records import MAX_BIGINT, check_name
from enginehouse_backends.accounting.schema import budgets as budgets_table
from enginehouse_backends.accounting.windows import WINDOW_NAMES, Window, WindowName, parse_time_zone, window_at
from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection, Row

MEASURES: Final = ("spend", "requests", "tokens")


@dataclass(frozen=True, slots=True)
class Limit:
    """A soft limit is reported when it is passed, a hard one refuses; None is no limit. Spend is in pico-units."""

    soft: int | None = None
    hard: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one tenant (``key_id`` "" counts all its keys together) in one kind of window."""

    tenant: str
    window: WindowName
    key_id: str = ""
    time_zone: str = "UTC"
    spend: Limit = Limit()
    requests: Limit = Limit()
    tokens: Limit = Limit()  # input and output, whether cached or not

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant)
        check_name("key_id", self.key_id, may_be_empty=True)
        parse_time_zone(self.time_zone)
        if self.window not in WINDOW_NAMES:
            problem = f"must be one of {', '.join(WINDOW_NAMES)}"
            raise ConfigurationError(refusal("window", problem, given=self.window))
        for measure in MEASURES:
            for strength in ("soft", "hard"):
                value = getattr(self.limit(measure), strength)
                if value is not None and not 0 <= value <= MAX_BIGINT:
                    field = f"{strength}_{measure}"
                    raise ConfigurationError(refusal(field, "is out of range", limit=f"0 to {MAX_BIGINT}", given=value))

    def limit(self, measure: str) -> Limit:
        """Return the limit on spend, requests or tokens."""
        limit = getattr(self, measure)
        assert isinstance(limit, Limit)
        return limit

    def window_at(self, at_ns: int) -> Window:
        """Return the window of this budget that holds a moment."""
        return window_at(self.window, parse_time_zone(self.time_zone), at_ns)

    def to_row(self) -> dict[str, Any]:
        """Return the budget as a row of its table."""
        limits = {
            f"{strength}_{measure}": getattr(self.limit(measure), strength)
            for measure in MEASURES
            for strength in ("soft", "hard")
        }
        names = {"tenant": self.tenant, "key_id": self.key_id, "window": self.window, "time_zone": self.time_zone}
        return {**names, **limits}

    @classmethod
    def from_row(cls, row: Row[Any]) -> Budget:
        """Read a row of the table."""
        values = row._mapping  # noqa: SLF001 - SQLAlchemy's public name, underscored to keep clear of columns
        limits = {name: Limit(values[f"soft_{name}"], values[f"hard_{name}"]) for name in MEASURES}
        return cls(values["tenant"], values["window"], values["key_id"], values["time_zone"], **limits)


BudgetsByTenant = dict[str, list[Budget]]

_BUDGETS_OF: Final = (
    select(budgets_table)
    .where(budgets_table.c.tenant.in_(bindparam("tenants", expanding=True)))
    .order_by(*budgets_table.primary_key)
    .with_for_update()
)


def lock_budgets(connection: Connection, tenants: Iterable[str]) -> BudgetsByTenant:
    """Read the budgets of tenants, those that have any, and lock them until the transaction ends.

    Whoever changes a tenant's windows does so under this lock, taken in one order, so that the batches of several
    processes cannot deadlock. (SQLite has one writer at a time anyway.)
    """
    found: BudgetsByTenant = {}
    if not (wanted := sorted(set(tenants))):
        return found
    for row in connection.execute(_BUDGETS_OF, {"tenants": wanted}):
        found.setdefault(row.tenant, []).append(Budget.from_row(row))
    return found
