"""Windows of time that budgets are counted in. Pure arithmetic.

Minutes and hours are those of the clock everywhere (UTC); days, weeks (from Monday) and months begin at midnight in a
stated time zone, so a day is 23 or 25 hours long when the clocks change. Windows of a kind follow each other without
gaps, and a moment's window depends on the moment alone: a clock that is set back finds what was spent before.
"""

from __future__ import annotations

import zoneinfo
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Final, Literal, get_args

from enginehouse_contract.errors import ConfigurationError, refusal

WindowName = Literal["minute", "hour", "day", "week", "month"]
WINDOW_NAMES: Final[tuple[WindowName, ...]] = get_args(WindowName)

NS_PER_S: Final = 10**9
_FIXED_NS: Final = {"minute": 60 * NS_PER_S, "hour": 3600 * NS_PER_S}


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """The moments from ``start_ns`` up to, but without, ``end_ns`` (Unix time)."""

    start_ns: int
    end_ns: int


def parse_time_zone(name: str) -> zoneinfo.ZoneInfo:
    """Return the zone of an IANA name; raise :class:`ConfigurationError` when there is none."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        hint = "Use an IANA name, such as Europe/Berlin or UTC."
        raise ConfigurationError(refusal("time_zone", "is unknown", given=name, hint=hint)) from None


def window_at(name: WindowName, zone: zoneinfo.ZoneInfo, at_ns: int) -> Window:
    """Return the window of a kind that holds a moment (Unix time in ns)."""
    if (length_ns := _FIXED_NS.get(name)) is not None:
        start_ns = at_ns - at_ns % length_ns
        return Window(start_ns, start_ns + length_ns)
    today = datetime.fromtimestamp(at_ns // NS_PER_S, zone).replace(tzinfo=None, hour=0, minute=0, second=0, fold=0)
    if name == "day":
        first, next_first = today, today + timedelta(days=1)
    elif name == "week":
        first = today - timedelta(days=today.weekday())
        next_first = first + timedelta(days=7)
    else:
        first = today.replace(day=1)
        next_first = (first + timedelta(days=32)).replace(day=1)
    return Window(_midnight_ns(first, zone), _midnight_ns(next_first, zone))


def _midnight_ns(day: datetime, zone: zoneinfo.ZoneInfo) -> int:
    """The moment a date begins: its first midnight where it has two, the jump itself where it has none."""
    return int(day.replace(tzinfo=zone).timestamp()) * NS_PER_S


def format_moment(at_ns: int, zone: zoneinfo.ZoneInfo | timezone = timezone.utc) -> str:
    """Return a moment as ISO 8601 to the second, in *zone*."""
    return datetime.fromtimestamp(at_ns // NS_PER_S, zone).isoformat()


def utc_day(at_ns: int) -> str:
    """Return the UTC date of a moment, as ISO 8601."""
    return datetime.fromtimestamp(at_ns // NS_PER_S, timezone.utc).date().isoformat()
