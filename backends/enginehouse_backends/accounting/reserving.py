"""Writing reservations, and the counts of requests that run: batches, each inside one transaction of the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import bindparam, func, insert, select, update

from enginehouse_backends.accounting.gate import Gate
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
    from collections.abc import Collection, Sequence

    from sqlalchemy import Connection

    from enginehouse_backends.accounting.price_list import PriceList
    from enginehouse_backends.accounting.rows import Row
    from enginehouse_contract.usage import TokenUsage

_E: Final = entries.c
_H: Final = holds.c


def reserve(
    connection: Connection, reservations: Sequence[Reservation], books: PriceList, owner: str, at_ns: int
) -> list[Admission | EnginehouseError]:
    """Hold each request's upper bound, at the prices in force now."""
    keys = [RequestKey(r.tenant, r.request_id, 1 if r.attempt is None else r.attempt) for r in reservations]
    known = find_entries(connection, "reservation", keys)
    gate = Gate(connection, reservations, at_ns)
    new: dict[RequestKey, dict[str, Any]] = {}
    claims: dict[RequestKey, str] = {}
    outcomes: list[Admission | EnginehouseError] = []
    for key, reservation in zip(keys, reservations, strict=True):
        is_taken = key in known or key in new
        try:
            if is_taken and reservation.attempt is not None:
                outcomes.append(_replay_of_reservation(key, reservation, known.get(key) or new[key]))
                continue
            if is_taken and (admission := _find_claim(connection, reservation)) is not None:
                outcomes.append(admission)
                continue
            own_key = key if not is_taken else _next_attempt(connection, key, new)
            priced = _price(reservation, books, at_ns)
            soft_limits = gate.admit(reservation, priced["amount"])
        except EnginehouseError as error:
            outcomes.append(error)
            continue
        new[own_key] = {
            **own_key._asdict(),
            "key_id": reservation.key_id,
            "model": reservation.model,
            "build_id": reservation.build_id,
            **usage_columns(reservation.upper_bound),
            **priced,
            "reserved_at_ns": at_ns,
        }
        claims[own_key] = reservation.claim
        outcomes.append(Admission(own_key, priced["amount"], soft_limits=soft_limits))
    if new:
        connection.execute(insert(entries), [entry_row(row, kind="reservation", at_ns=at_ns) for row in new.values()])
        connection.execute(insert(holds), [hold_row(row, owner, claims[key]) for key, row in new.items()])
    return outcomes


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


def _replay_of_reservation(key: RequestKey, reservation: Reservation, row: Row) -> Admission:
    given = (reservation.key_id, reservation.model, reservation.build_id, reservation.upper_bound)
    if given != (row["key_id"], row["model"], row["build_id"], usage_of(row)):
        raise conflict(key, "was reserved before with other content")
    return Admission(key, money(row["amount"]), is_replay=True)


def _find_claim(connection: Connection, reservation: Reservation) -> Admission | None:
    """Find the hold of the very same call, which was durable although its caller was told that it failed."""
    query = select(_H.attempt, _H.amount).where(
        _H.tenant == reservation.tenant, _H.request_id == reservation.request_id, _H.claim == reservation.claim
    )
    row = connection.execute(query).first()
    if row is None:
        return None
    key = RequestKey(reservation.tenant, reservation.request_id, row.attempt)
    return Admission(key, money(row.amount), is_replay=True)


def _next_attempt(connection: Connection, key: RequestKey, new: Collection[RequestKey]) -> RequestKey:
    query = select(func.max(_E.attempt)).where(_E.tenant == key.tenant, _E.request_id == key.request_id)
    stored = connection.execute(query).scalar() or 0
    in_batch = max((other.attempt for other in new if other[:2] == key[:2]), default=0)
    return key._replace(attempt=max(stored, in_batch) + 1)


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
