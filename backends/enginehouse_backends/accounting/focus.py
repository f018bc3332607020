"""Export as FOCUS 1.2 (FinOps Open Cost and Usage Specification): one row per day, tenant, build and token class."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select

from enginehouse_backends.accounting.database import reading
from enginehouse_backends.accounting.price_list import PriceList
from enginehouse_backends.accounting.schema import daily_usage
from enginehouse_backends.accounting.views import ALL_DAYS, Period, in_period
from enginehouse_contract.money import format_amount

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from enginehouse_backends.accounting.price_book import TokenPrices

_CLASSES: Final = (
    ("input", "num_input_uncached_tokens", "input_amount"),
    ("cached_input", "num_input_cached_tokens", "cached_input_amount"),
    ("output", "num_output_tokens", "output_amount"),
)

PROVIDER: Final = "Enginehouse"


def focus_rows(database: Engine, billing_account_id: str, period: Period = ALL_DAYS) -> list[dict[str, str]]:
    """Return the rows of an export, all values as text; usage without a price has empty costs."""
    query = select(daily_usage).where(*in_period(daily_usage.c.day, period)).order_by(*daily_usage.primary_key)
    with reading(database) as connection:
        books = PriceList.load(connection)
        days = connection.execute(query).mappings().all()
    rows: list[dict[str, str]] = []
    for day in days:
        book = books.by_id(day["book_id"])
        prices = None if book is None else book.prices_for(day["model"], day["build_id"])
        common = _common(day, "" if book is None else book.currency, billing_account_id)
        rows.extend(
            {**common, **_line(day, token_class, int(day[count]), int(day[amount]), prices)}
            for token_class, count, amount in _CLASSES
            if day[count]
        )
    return rows


def _common(day: Any, currency: str, billing_account_id: str) -> dict[str, str]:
    """What the rows of one day, tenant and build share."""
    start = date.fromisoformat(day["day"])
    month = start.replace(day=1)
    return {
        "BillingAccountId": billing_account_id,
        "BillingAccountName": billing_account_id,
        "BillingCurrency": currency,
        "BillingPeriodStart": _moment(month),
        "BillingPeriodEnd": _moment((month + timedelta(days=32)).replace(day=1)),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _moment(start),
        "ChargePeriodEnd": _moment(start + timedelta(days=1)),
        "InvoiceIssuerName": PROVIDER,
        "PricingCategory": "Standard",
        "ProviderName": PROVIDER,
        "PublisherName": PROVIDER,
        "ResourceId": day["build_id"],
        "ResourceName": day["model"],
        "ResourceType": "Engine build",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "LLM inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": day["model"],
        "SubAccountId": day["tenant"],
        "SubAccountName": day["tenant"],
        "SubAccountType": "Tenant",
    }


def _line(day: Any, token_class: str, num_tokens: int, amount: int, prices: TokenPrices | None) -> dict[str, str]:
    cost = "" if prices is None else format_amount(amount)
    unit_price = "" if prices is None else f"{getattr(prices, token_class):f}"
    kind = f"{token_class.replace('_', ' ')} tokens"
    return {
        "BilledCost": cost,
        "ChargeDescription": f"{kind} of {day['model']}",
        "ConsumedQuantity": str(num_tokens),
        "ConsumedUnit": "Tokens",
        "ContractedCost": cost,
        "ContractedUnitPrice": unit_price,
        "EffectiveCost": cost,
        "ListCost": cost,
        "ListUnitPrice": unit_price,
        "PricingQuantity": f"{Decimal(num_tokens) / 10**6:f}",
        "PricingUnit": "1000000 Tokens",
        "SkuMeter": kind,
        "SkuPriceId": "" if prices is None else f"{day['book_id']}/{day['model']}/{token_class}",
    }


def _moment(day: date) -> str:
    return f"{day.isoformat()}T00:00:00Z"
