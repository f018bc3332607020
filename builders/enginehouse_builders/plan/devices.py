"""The device catalogue: GPUs as data with public sources, and this CPU as it measures itself."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any, Final

import yaml

from enginehouse_contract.errors import ConfigurationError

CPU: Final = "cpu"
_DATA: Final = "devices.yaml"
_FLOATS: Final = ("bytes_per_s", "f16_flops", "fp8_flops", "int8_ops", "fp4_flops", "watts", "links_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of one device costs, where and when that was observed."""

    per_hour: Decimal
    currency: str
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device's peaks: bytes and operations per second, dense. ``sm`` is None for a CPU."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    f16_flops: float
    source: str
    fp8_flops: float | None = None
    int8_ops: float | None = None
    fp4_flops: float | None = None
    sm: int | None = None
    watts: float | None = None
    links_bytes_per_s: float | None = None
    price: Price | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether it is this host's processor."""
        return self.sm is None


def gpu(name: str) -> Device:
    """Return a GPU by name or alias, in any case.

    Raises :class:`ConfigurationError` for a name that is not in the catalogue, with the nearest that is.
    """
    data = _catalogue()
    key = name.lower().replace("_", "-").replace(" ", "-")
    key = data["aliases"].get(key, key)
    row = data["devices"].get(key)
    if row is None:
        names = device_names()
        nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"did you mean `{nearest[0]}`? " if nearest else ""
        raise ConfigurationError(f"`device` {name!r} is not in the catalogue; {hint}Known: {', '.join(names)}.")
    numbers = {field: float(row[field]) for field in _FLOATS if field in row}
    return Device(
        name=key, memory_bytes=row["memory_bytes"], sm=row["sm"], source=row["source"], price=_price(row), **numbers
    )


def gpu_or_none(name: str) -> Device | None:
    """Return a GPU of the catalogue, or None for a name that is not in it."""
    return None if name == CPU or name.lower() not in device_names() else gpu(name)


def device_names() -> list[str]:
    """Return the names of all devices, this CPU first, with the aliases."""
    data = _catalogue()
    return [CPU, *sorted({*data["devices"], *data["aliases"]})]


def _price(row: dict[str, Any]) -> Price | None:
    for place, amount in row.get("price", {}).items():
        observed = _catalogue()["prices"][place]
        return Price(Decimal(amount), observed["currency"], f"{observed['source']}, {observed['date']}")
    return None


@cache
def _catalogue() -> Any:
    text = resources.files(__package__).joinpath(_DATA).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - the safe loader, in C
