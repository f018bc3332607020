"""Windows: they follow each other without gaps, whatever the clocks of a place do."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from enginehouse_backends.accounting.windows import (
    NS_PER_S,
    WINDOW_NAMES,
    WindowName,
    format_moment,
    parse_time_zone,
    window_at,
)
from enginehouse_contract.errors import ConfigurationError

# Gaps and overlaps at midnight, half-hour shifts, a skipped date, and ordinary places.
ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Havana",
    "America/Sao_Paulo",
    "Asia/Beirut",
    "Asia/Kolkata",
    "Australia/Lord_Howe",
    "Pacific/Apia",
]
HOUR_NS = 3600 * NS_PER_S


def moment(text: str, zone: str) -> int:
    """Return a local time as Unix time in ns."""
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * NS_PER_S


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("name", WINDOW_NAMES)
def test_windows_hold_their_moment_and_touch(name: WindowName, zone: str) -> None:
    """Every moment lies in its window; each window's end is the next one's start; all its moments agree on it."""
    place, rng = parse_time_zone(zone), random.Random(7)
    for _ in range(300):
        at_ns = rng.randrange(moment("2009-01-01", "UTC"), moment("2030-01-01", "UTC"))
        window = window_at(name, place, at_ns)

        assert window.start_ns <= at_ns < window.end_ns
        assert window_at(name, place, window.end_ns).start_ns == window.end_ns
        assert window_at(name, place, window.end_ns - 1) == window
        assert window_at(name, place, rng.randrange(window.start_ns, window.end_ns)) == window


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Havana", "Australia/Lord_Howe", "Pacific/Apia"])
def test_a_day_is_every_moment_of_one_local_date(zone: str) -> None:
    """Against a slow oracle: walk half-hours over a year with odd days and compare with the local date."""
    place = parse_time_zone(zone)
    at_ns = moment("2011-01-01", zone)
    while at_ns < moment("2012-02-01", zone):
        window = window_at("day", place, at_ns)
        date = datetime.fromtimestamp(at_ns // NS_PER_S, place).date()
        while at_ns < window.end_ns:
            assert datetime.fromtimestamp(at_ns // NS_PER_S, place).date() == date
            at_ns += HOUR_NS // 2
        assert datetime.fromtimestamp(window.end_ns // NS_PER_S, place).date() > date
        at_ns = window.end_ns


def test_days_have_23_and_25_hours_when_the_clocks_change() -> None:
    """Berlin, 2025."""
    berlin = parse_time_zone("Europe/Berlin")
    noons = [moment(f"{day}T12:00", "Europe/Berlin") for day in ("2025-03-30", "2025-10-26", "2025-06-01")]
    days = [window_at("day", berlin, noon_ns) for noon_ns in noons]
    lengths = [(day.end_ns - day.start_ns) // HOUR_NS for day in days]

    assert lengths == [23, 25, 24]


@pytest.mark.parametrize(
    ("at", "start", "end"),
    [
        ("2024-01-31T23:59:59", "2024-01-01", "2024-02-01"),
        ("2024-02-29T00:00:00", "2024-02-01", "2024-03-01"),
        ("2023-12-31T23:59:59", "2023-12-01", "2024-01-01"),
        ("2025-02-28T12:00:00", "2025-02-01", "2025-03-01"),
    ],
)
def test_months_end_where_calendars_say(at: str, start: str, end: str) -> None:
    """Short, leap and last months."""
    window = window_at("month", parse_time_zone("America/New_York"), moment(at, "America/New_York"))

    assert (window.start_ns, window.end_ns) == (moment(start, "America/New_York"), moment(end, "America/New_York"))


def test_weeks_begin_on_monday() -> None:
    """Sunday's last second and Monday's first lie in different weeks."""
    berlin = parse_time_zone("Europe/Berlin")
    sunday = window_at("week", berlin, moment("2025-06-08T23:59:59", "Europe/Berlin"))

    assert sunday.start_ns == moment("2025-06-02", "Europe/Berlin")
    assert sunday.end_ns == moment("2025-06-09", "Europe/Berlin")


def test_a_clock_that_is_set_back_finds_the_window_it_had() -> None:
    """A moment's window depends on nothing but the moment."""
    berlin = parse_time_zone("Europe/Berlin")
    noon_ns = moment("2025-06-08T12:00", "Europe/Berlin")
    before = window_at("day", berlin, noon_ns)
    window_at("day", berlin, noon_ns + int(timedelta(days=3).total_seconds()) * NS_PER_S)

    assert window_at("day", berlin, noon_ns) == before


def test_unknown_zones_are_refused_and_moments_are_shown_in_their_zone() -> None:
    """The refusal says what a zone's name looks like."""
    with pytest.raises(ConfigurationError, match=r"`time_zone` is unknown; given Mars/Olympus. Use an IANA name"):
        parse_time_zone("Mars/Olympus")
    with pytest.raises(ConfigurationError, match="`time_zone` is unknown"):
        parse_time_zone("../../etc/passwd")
    berlin_noon = moment("2025-06-08T12:00", "Europe/Berlin")
    assert format_moment(berlin_noon, parse_time_zone("Europe/Berlin")) == "2025-06-08T12:00:00+02:00"
