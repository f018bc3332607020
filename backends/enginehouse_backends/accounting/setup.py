"""From the settings of an installation to its ledger and its meter."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from enginehouse_backends.accounting.energy import EnergySplitter, find_meter
from enginehouse_backends.accounting.ledger import Ledger
from enginehouse_backends.accounting.ledger_meter import LedgerMeter
from enginehouse_backends.accounting.machine_clock import SharedClock
from enginehouse_backends.accounting.machine_time import MachineTimeReporter
from enginehouse_backends.accounting.meter import NoMeter
from enginehouse_contract.errors import LedgerUnavailableError

if TYPE_CHECKING:
    from enginehouse_backends.accounting.energy import PowerModel
    from enginehouse_backends.accounting.meter import Meter
    from enginehouse_contract.settings import Settings

_LOGGER = logging.getLogger(__name__)


def open_ledger(settings: Settings, *, may_be_away: bool = False) -> Ledger:
    """Open the ledger of an installation; its folder is created where it is our own.

    Raises:
        ConfigurationError: Its URL is wrong, or it is newer than this program.
        LedgerUnavailableError: It cannot be opened.
    """
    if not settings.ledger_url:
        with contextlib.suppress(OSError):  # the database says what is wrong with the folder
            settings.home.mkdir(parents=True, exist_ok=True)
    url = settings.ledger_url or f"sqlite:///{settings.home / 'ledger.db'}"
    return Ledger(url, may_be_away=may_be_away)


def open_energy(settings: Settings, declared: PowerModel | None) -> EnergySplitter:
    """Return what splits this machine's time and energy, shared by every engine of the installation."""
    meter = find_meter(declared)
    clock = SharedClock(settings.home, () if meter is None else meter.read_counters())
    return EnergySplitter(meter, clock)


def open_machine_time(settings: Settings, energy: EnergySplitter) -> MachineTimeReporter | None:
    """Return what writes the machine's time to the ledger; None where accounting is off.

    Raises:
        ConfigurationError: See :func:`open_ledger`.
    """
    if settings.accounting == "off":
        return None
    return MachineTimeReporter(open_ledger(settings, may_be_away=True), energy)


def open_meter(settings: Settings) -> Meter:
    """Return the meter of a server, after settling what a process that died has left open.

    Raises:
        ConfigurationError: See :func:`open_ledger`.
        LedgerUnavailableError: The ledger cannot be opened, and the policy is to refuse.
    """
    if settings.accounting == "off":
        return NoMeter()
    is_serving = settings.on_ledger_failure == "serve"
    ledger = open_ledger(settings, may_be_away=is_serving)
    try:
        for record in ledger.recover():
            _LOGGER.warning("request %s of a process that died was settled from its last counts", record.key)
    except LedgerUnavailableError as error:
        if not is_serving:
            ledger.close()
            raise
        _LOGGER.warning("starting without the ledger: %s", error)
    return LedgerMeter(ledger, settings.on_ledger_failure)
