"""Writing the machine's time to the ledger: how long an engine saw it, and the energy that no request used.

With the machine-hour rate of the price book this is the machine's bill, of which requests have their parts.
"""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Final

from enginehouse_backends.accounting.ledger import MachineTime
from enginehouse_contract.errors import EnginehouseError

if TYPE_CHECKING:
    from enginehouse_backends.accounting.energy import EnergySplitter
    from enginehouse_backends.accounting.ledger import Ledger

_LOGGER = logging.getLogger(__name__)
_PERIOD_S: Final = 10.0


class MachineTimeReporter:
    """Reports an engine's machine time now and then, and for the last time when closed; closes the ledger too.

    A report that the ledger does not take is added to the next one.
    """

    def __init__(self, ledger: Ledger, energy: EnergySplitter, period_s: float = _PERIOD_S) -> None:
        self._ledger = ledger
        self._energy = energy
        self._period_s = period_s
        self._owed = MachineTime(socket.gethostname(), 0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-time", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report for the last time."""
        self._closing.set()
        self._thread.join()
        self._report()
        self._ledger.close()

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            self._report()

    def _report(self) -> None:
        uptime_ns, idle = self._energy.take_idle()
        owed = self._owed
        self._owed = MachineTime(
            owed.machine,
            owed.uptime_ns + uptime_ns,
            owed.idle_energy_uj + idle.energy_uj,
            owed.is_estimated or idle.is_estimated,
        )
        try:
            self._ledger.record_machine_time(self._owed)
        except EnginehouseError as error:
            _LOGGER.warning("the machine's time could not be written, and is written later: %s", error)
        else:
            self._owed = MachineTime(owed.machine, 0)
