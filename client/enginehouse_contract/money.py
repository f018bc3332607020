"""Money: integer pico-units of a currency, computed from Decimal prices, rounded once per line.

A price of 0.05 per million tokens is 50,000 pico-units a token; a discount of three quarters still is a whole number.
Floats never enter: amounts are :class:`int`, prices :class:`~decimal.Decimal`. ``None`` means unknown and is never 0.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation, localcontext
from typing import Final, NewType

from enginehouse_contract.errors import ConfigurationError, refusal

Pico = NewType("Pico", int)
"""An amount of money in 10^-12 of the currency's unit; may be negative in a reversal."""

PICO_PER_UNIT: Final = 10**12
TOKENS_PER_PRICE: Final = 10**6  # prices are per million tokens

_EXACT: Final = Context(prec=80)  # enough for any product of what parse_price admits

_PLAIN_DECIMAL: Final = re.compile(r"\d{1,12}(\.\d{1,18})?")


def parse_price(text: object, field: str) -> Decimal:
    """Parse a price or a rate given as a plain decimal string ("0.15"), at least 0.

    Raises :class:`ConfigurationError` for a float, a negative number, an exponent, or anything that is not a string.
    """
    if not isinstance(text, str) or not _PLAIN_DECIMAL.fullmatch(text):
        hint = 'Write it as a quoted decimal, such as "0.15".'
        raise ConfigurationError(refusal(field, "must be a decimal string of at least 0", given=repr(text), hint=hint))
    return Decimal(text)


def price_of_tokens(num_tokens: int, price_per_million: Decimal) -> Pico:
    """Return the price of *num_tokens*, rounded half-even to a pico-unit: the one rounding of a line.

    >>> price_of_tokens(3, Decimal("0.05"))
    150000
    """
    return _round(num_tokens * PICO_PER_UNIT, price_per_million, TOKENS_PER_PRICE)


def price_of_seconds(duration_ns: int, price_per_hour: Decimal) -> Pico:
    """Return the price of machine time, rounded half-even to a pico-unit.

    >>> price_of_seconds(3_600_000_000_000, Decimal("1.5")) == 1_500_000_000_000
    True
    """
    return _round(duration_ns * PICO_PER_UNIT, price_per_hour, 3600 * 10**9)


def _round(quantity: int, price: Decimal, divisor: int) -> Pico:
    with localcontext(_EXACT):
        return Pico(int((Decimal(quantity) * price / divisor).to_integral_value(ROUND_HALF_EVEN)))


def format_amount(amount: Pico | int) -> str:
    """Return an amount as a plain decimal string, without an exponent and without trailing zeros.

    >>> format_amount(1_500_000_000_000), format_amount(-25), format_amount(0)
    ('1.5', '-0.000000000025', '0')
    """
    sign, amount = ("-", -amount) if amount < 0 else ("", amount)
    whole, fraction = divmod(amount, PICO_PER_UNIT)
    text = f"{whole}.{fraction:012d}".rstrip("0").rstrip(".")
    return sign + text


def parse_amount(text: object, field: str) -> Pico:
    """Parse what :func:`format_amount` writes, or any decimal with at most twelve places.

    Raises :class:`ConfigurationError` when it is not one.
    """
    try:
        value = Decimal(text) if isinstance(text, str) else Decimal("NaN")
    except InvalidOperation:
        value = Decimal("NaN")
    scaled = value * PICO_PER_UNIT if value.is_finite() else value
    if not scaled.is_finite() or scaled != scaled.to_integral_value():
        problem = "must be a decimal string with at most 12 places"
        raise ConfigurationError(refusal(field, problem, given=repr(text)))
    return Pico(int(scaled))
