"""Writing reservations, and the counts of requests that run: batches, each inside one transaction of the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import bindparam, func, insert, select, update

from enginehouse_backends.accounting.gate import Gate, Priced
from enginehouse_backends.accounting.price_list import no_price_columns, price_columns
from enginehouse_backends.accounting.records import MAX_BIGINT, Admission, RequestKey, Reservation
from enginehouse_backends.accounting.rows import (
    conflict,
    entry_row,
    find_entries,
    hold_row,
    money,
    usage_columns,
    usage_of,
)
from enginehouse_backends.accounting.schema import USAGE_COLUMNS, entries, holds
from enginehouse_contract.errors import ConfigurationError, EnginehouseError, InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from enginehouse_backends.accounting.budgets import BudgetsByTenant
    from enginehouse_backends.accounting.price_list import PriceList
    from enginehouse_backends.accounting.rows import Row
    from enginehouse_contract.usage import TokenUsage

_E: Final = entries.c
_H: Final = holds.c


def reserve(
    connection: Connection,
    reservations: Sequence[Reservation],
    books: PriceList,
    budgets: BudgetsByTenant,
    owner: str,
    at_ns: int,
) -> list[Admission | EnginehouseError]:
    """Hold each request's upper bound, at the prices in force now; a key that comes twice is taken up again later."""
    outcomes: dict[int, Admission | EnginehouseError] = {}
    waiting = list(range(len(reservations)))
    while waiting:
        first = {_first_key(reservations[position]): position for position in reversed(waiting)}
        chosen = sorted(first.values())
        distinct = [reservations[position] for position in chosen]
        answers = _reserve_distinct(connection, distinct, books, budgets, owner, at_ns)
        outcomes.update(zip(chosen, answers, strict=True))
        waiting = [position for position in waiting if position not in outcomes]
    return [outcomes[position] for position in range(len(reservations))]


def _first_key(reservation: Reservation) -> RequestKey:
    return RequestKey(reservation.tenant, reservation.request_id, reservation.attempt or 1)


def _reserve_distinct(
    connection: Connection,
    reservations: Sequence[Reservation],
    books: PriceList,
    budgets: BudgetsByTenant,
    owner: str,
    at_ns: int,
) -> list[Admission | EnginehouseError]:
    known = find_entries(connection, "reservation", map(_first_key, reservations))
    outcomes: dict[int, Admission | EnginehouseError] = {}
    candidates: dict[int, tuple[RequestKey, dict[str, Any]]] = {}
    for position, reservation in enumerate(reservations):
        key = _first_key(reservation)
        try:
            if key in known:
                replay = _find_replay(connection, reservation, known[key])
                if replay is not None:
                    outcomes[position] = replay
                    continue
                key = _next_attempt(connection, key)
            candidates[position] = (key, _price(reservation, books, at_ns))
        except EnginehouseError as error:
            outcomes[position] = error
    gate = Gate(connection, budgets, at_ns)
    answers = gate.admit([Priced(reservations[it], priced["amount"]) for it, (_, priced) in candidates.items()])
    new = []
    for (position, (key, priced)), answer in zip(candidates.items(), answers, strict=True):
        if isinstance(answer, EnginehouseError):
            outcomes[position] = answer
            continue
        outcomes[position] = Admission(key, priced["amount"], soft_limits=answer)
        reservation = reservations[position]
        row = {
            **key._asdict(),
            "key_id": reservation.key_id,
            "model": reservation.model,
            "build_id": reservation.build_id,
            **usage_columns(reservation.upper_bound),
            **priced,
            "reserved_at_ns": at_ns,
        }
        new.append((row, reservation.claim))
    if new:
        connection.execute(insert(entries), [entry_row(row, kind="reservation", at_ns=at_ns) for row, _ in new])
        connection.execute(insert(holds), [hold_row(row, owner, claim) for row, claim in new])
    return [outcomes[position] for position in range(len(reservations))]


def _price(reservation: Reservation, books: PriceList, at_ns: int) -> dict[str, Any]:
    """Price the upper bound; raise :class:`ConfigurationError` where the model has no price and must have one."""
    in_force = books.in_force(at_ns)
    if in_force is None:
        return {"amount": None, **no_price_columns()}
    book_id, book = in_force
    prices = book.prices_for(reservation.model, reservation.build_id)
    if prices is None:
        if book.unknown_model == "refuse":
            hint = "Add it to the price book, or set the book's `unknown_model` to null."
            problem = f"has no price in the price book {book_id}"
            raise ConfigurationError(refusal("model", problem, given=reservation.model, hint=hint))
        return {"amount": None, **no_price_columns()}
    if (amount := prices.amount(reservation.upper_bound)) > MAX_BIGINT:
        raise InvalidRequestError(refusal("upper_bound", "costs more than the ledger can hold", given=amount))
    return {"amount": amount, **price_columns(book_id, prices)}


def _find_replay(connection: Connection, reservation: Reservation, known: Row) -> Admission | None:
    """Answer what was reserved before; None where the same id is another request, and may be its next attempt."""
    key = _first_key(reservation)
    if reservation.attempt is None:
        return _find_claim(connection, reservation)
    given = (reservation.key_id, reservation.model, reservation.build_id, reservation.upper_bound)
    if given != (known["key_id"], known["model"], known["build_id"], usage_of(known)):
        raise conflict(key, "was reserved before with other content")
    return Admission(key, money(known["amount"]), is_replay=True)


def _find_claim(connection: Connection, reservation: Reservation) -> Admission | None:
    """Find the hold of the very same call, which was durable although its caller was told that it failed."""
    query = select(_H.attempt, _H.amount).where(
        _H.tenant == reservation.tenant, _H.request_id == reservation.request_id, _H.claim == reservation.claim
    )
    row = connection.execute(query).first()
    if row is None:
        return None
    return Admission(_first_key(reservation)._replace(attempt=row.attempt), money(row.amount), is_replay=True)


def _next_attempt(connection: Connection, key: RequestKey) -> RequestKey:
    query = select(func.max(_E.attempt)).where(_E.tenant == key.tenant, _E.request_id == key.request_id)
    return key._replace(attempt=connection.execute(query).scalar_one() + 1)


class Progress(NamedTuple):
    """The token counts of a request that still runs."""

    key: RequestKey
    usage: TokenUsage
    owner: str


_PROGRESS: Final = (
    update(holds)
    .where(
        *(_H[name] == bindparam(f"of_{name}") for name in RequestKey._fields),
        _H.owner == bindparam("of_owner"),
    )
    .values({name: bindparam(name) for name in USAGE_COLUMNS})
)


def progress(connection: Connection, updates: Sequence[Progress]) -> None:
    """Make the last counts of running requests durable; a request that has ended, or changed hands, keeps its own."""
    latest = {update.key: update for update in updates}
    rows = [
        {
            **{f"of_{name}": value for name, value in key._asdict().items()},
            "of_owner": it.owner,
            **usage_columns(it.usage),
        }
        for key, it in latest.items()
    ]
    connection.execute(_PROGRESS, rows)
