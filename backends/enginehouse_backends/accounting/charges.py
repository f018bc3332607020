"""Charging what requests came to against the windows their reservations fell in."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from sqlalchemy import and_, bindparam, select, update

from enginehouse_backends.accounting.schema import budget_windows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy import Connection

    from enginehouse_backends.accounting.budgets import BudgetsByTenant


class Charge(NamedTuple):
    """What a settlement, a release or a reversal changes in the windows of its reservation."""

    tenant: str
    key_id: str
    reserved_at_ns: int
    spent: int
    held: int
    num_requests: int
    num_tokens: int


_W: Final = budget_windows.c
_COUNTS: Final = ("spent", "held", "num_requests", "num_tokens")
_KEY: Final = ("tenant", "key_id", "window", "start_ns")
_WINDOWS_OF: Final = select(*(_W[name] for name in _KEY), _W.end_ns).where(
    _W.tenant.in_(bindparam("tenants", expanding=True)),
    _W.start_ns <= bindparam("last_ns"),
    _W.end_ns > bindparam("first_ns"),
)
_ADD: Final = (
    update(budget_windows)
    .where(and_(*(_W[name] == bindparam(f"of_{name}") for name in _KEY)))
    .values({name: _W[name] + bindparam(f"more_{name}", type_=_W[name].type) for name in _COUNTS})
)


def charge_windows(connection: Connection, charges: Iterable[Charge], budgets: BudgetsByTenant) -> None:
    """Add charges to the windows they fall in, one statement a window; tenants without budgets cost nothing."""
    by_tenant: dict[str, list[Charge]] = defaultdict(list)
    for charge in charges:
        if charge.tenant in budgets:
            by_tenant[charge.tenant].append(charge)
    if not by_tenant:
        return
    times_ns = [charge.reserved_at_ns for members in by_tenant.values() for charge in members]
    found = {"tenants": sorted(by_tenant), "first_ns": min(times_ns), "last_ns": max(times_ns)}
    rows = []
    for window in connection.execute(_WINDOWS_OF, found).all():
        members = [
            charge
            for charge in by_tenant[window.tenant]
            if window.key_id in {"", charge.key_id} and window.start_ns <= charge.reserved_at_ns < window.end_ns
        ]
        if members:
            key = {f"of_{name}": getattr(window, name) for name in _KEY}
            more = {f"more_{name}": sum(getattr(charge, name) for charge in members) for name in _COUNTS}
            rows.append({**key, **more})
    if rows:
        connection.execute(_ADD, rows)
