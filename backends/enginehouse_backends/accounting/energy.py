"""Energy: measured where the machine can, declared where it cannot, split over the sequences that caused it.

RAPL (Linux powercap) covers the processor packages, NVML the GPUs. Both count up by themselves; what was used between
two calls is their difference. Where neither can be read, a declared power model stands in, and everything that comes
of it is marked as estimated.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from enginehouse_backends.accounting.machine_clock import OwnClock
from enginehouse_backends.accounting.records import ComputeShare
from enginehouse_backends.accounting.shares import split_by_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from decimal import Decimal

    from enginehouse_backends.accounting.machine_clock import MachineClock

POWERCAP_DIR: Final = Path("/sys/class/powercap")
_UJ_PER_MJ: Final = 1000
_NS_UW_PER_UJ: Final = 10**9  # a microwatt for a nanosecond, in microjoules


class EnergyMeter(Protocol):
    """Tells energy from counters that are read, and time that passed, between two moments."""

    @property
    def is_estimated(self) -> bool:
        """Whether the energy is declared rather than measured."""
        ...

    def read_counters(self) -> list[int]:
        """Read the counters; raises :class:`OSError` where they cannot be read now."""
        ...

    def used_uj(self, before: Sequence[int], now: Sequence[int], duration_ns: int, *, is_active: bool) -> int:
        """Return the microjoules between two readings *duration_ns* apart, in which the engine computed or not."""
        ...


@dataclass(slots=True)
class PowerModel:
    """Declared power of the machine, in watts, while the engine computes and while it does not. It has no counters."""

    idle_watts: Decimal
    active_watts: Decimal
    is_estimated: bool = field(default=True, init=False)
    _rest: int = field(default=0, init=False)  # less than a microjoule, carried on so that nothing is lost

    def read_counters(self) -> list[int]:
        """See :class:`EnergyMeter`."""
        return []

    def used_uj(self, before: Sequence[int], now: Sequence[int], duration_ns: int, *, is_active: bool) -> int:  # noqa: ARG002 - the protocol's arguments
        """See :class:`EnergyMeter`."""
        microwatts = int((self.active_watts if is_active else self.idle_watts) * 10**6)
        energy_uj, self._rest = divmod(microwatts * duration_ns + self._rest, _NS_UW_PER_UJ)
        return energy_uj


@dataclass(frozen=True, slots=True)
class CounterMeter:
    """Reads counters that only go up, and start again at their range; in microjoules."""

    read_counters: Callable[[], list[int]]
    ranges_uj: Sequence[int | None]
    is_estimated: bool = field(default=False, init=False)

    def used_uj(self, before: Sequence[int], now: Sequence[int], duration_ns: int, *, is_active: bool) -> int:  # noqa: ARG002 - a counter knows by itself
        """See :class:`EnergyMeter`."""
        used = 0
        for new, old, range_uj in zip(now, before, self.ranges_uj, strict=True):
            used += new - old if new >= old or range_uj is None else new - old + range_uj
        return max(0, used)


def find_meter(declared: PowerModel | None, powercap_dir: Path = POWERCAP_DIR) -> EnergyMeter | None:
    """Return the best meter of this machine: RAPL and NVML where they can be read, else *declared*.

    The declared power is the whole machine's, so it is not added to what is measured.
    """
    measured = [meter for meter in (_find_rapl(powercap_dir), _find_nvml()) if meter is not None]
    if not measured:
        return declared
    return CounterMeter(
        lambda: [value for meter in measured for value in meter.read_counters()],
        [range_uj for meter in measured for range_uj in meter.ranges_uj],
    )


def _find_rapl(powercap_dir: Path) -> CounterMeter | None:
    """The processor packages' counters; the zones below a package (``intel-rapl:0:1``) are part of it."""
    packages = [path for path in sorted(powercap_dir.glob("intel-rapl:*")) if path.name.count(":") == 1]
    counters = [path / "energy_uj" for path in packages]
    try:
        ranges = [int((path / "max_energy_range_uj").read_text(encoding="ascii")) for path in packages]
        meter = CounterMeter(lambda: [int(path.read_text(encoding="ascii")) for path in counters], ranges)
        return meter if meter.read_counters() else None
    except (OSError, ValueError):  # most systems let only root read them
        return None


def _find_nvml() -> CounterMeter | None:
    try:
        import pynvml  # noqa: PLC0415 - optional, and only of use where there is a GPU
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        if not handles:
            return None
        meter = CounterMeter(
            lambda: [int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * _UJ_PER_MJ for handle in handles],
            [None] * len(handles),
        )
        meter.read_counters()
    except nvml.NVMLError:
        return None
    return meter


class EnergySplitter:
    """Splits time and energy over the sequences that were computed, by tokens; what is left is idle.

    The engine calls :meth:`end_step` after every step and :meth:`end_idle` when it wakes up to new work, from one
    thread; any thread may take what is idle. Nothing is lost or doubled: what was taken, what is still open and what is
    idle add up to ``total``.

    Args:
        meter: Tells energy; none where the machine cannot and nothing was declared.
        clock: Keeps the last reading; shared where several engines run on one machine.
    """

    def __init__(self, meter: EnergyMeter | None = None, clock: MachineClock | None = None) -> None:
        self._meter = meter
        self._clock = clock or OwnClock(() if meter is None else meter.read_counters())
        self._lock = threading.Lock()
        self._open: dict[Hashable, ComputeShare] = {}
        self.idle = ComputeShare()
        self.total = ComputeShare()
        self._num_reported_ns = 0

    @property
    def tells_energy(self) -> bool:
        """Whether there is a meter: without one, energy is unknown, not 0."""
        return self._meter is not None

    def end_step(self, num_tokens_by_sequence: Mapping[Any, int]) -> None:
        """Split what was used since the last call over the sequences, by the tokens that were computed for each."""
        sequences = [sequence for sequence, num_tokens in num_tokens_by_sequence.items() if num_tokens > 0]
        with self._lock:
            spent = self._spend(is_active=True)
            if not sequences:
                self.idle += spent
                return
            weights = [num_tokens_by_sequence[sequence] for sequence in sequences]
            energies = split_by_weight(spent.energy_uj, weights)
            times = split_by_weight(spent.machine_ns, weights)
            for sequence, energy_uj, machine_ns in zip(sequences, energies, times, strict=True):
                share = ComputeShare(energy_uj, machine_ns, spent.is_estimated)
                self._open[sequence] = self._open.get(sequence, ComputeShare()) + share

    def end_idle(self) -> None:
        """Count what was used since the last call as idle."""
        with self._lock:
            self.idle += self._spend(is_active=False)

    def take(self, sequence: Hashable) -> ComputeShare:
        """Return, once, what a sequence that has ended used."""
        with self._lock:
            return self._open.pop(sequence, ComputeShare())

    def take_idle(self) -> tuple[int, ComputeShare]:
        """Return, once, how long this machine was seen since the last call, and what of it was idle: for the ledger."""
        with self._lock:
            uptime_ns = self.total.machine_ns - self._num_reported_ns
            self._num_reported_ns = self.total.machine_ns
            taken, self.idle = self.idle, ComputeShare()
            return uptime_ns, taken

    def _spend(self, *, is_active: bool) -> ComputeShare:
        meter = self._meter
        with self._clock.exclusive() as last:
            now_ns = self._clock.now_ns()
            duration_ns, last.at_ns = now_ns - last.at_ns, now_ns
            energy_uj = 0
            if meter is not None:
                with contextlib.suppress(OSError):  # read again next time, and nothing is lost
                    counters = meter.read_counters()
                    energy_uj = meter.used_uj(last.counters, counters, duration_ns, is_active=is_active)
                    last.counters = counters
        spent = ComputeShare(energy_uj, duration_ns, meter is not None and meter.is_estimated)
        self.total += spent
        return spent
