"""Energy: measured where the machine can, declared where it cannot, split over the sequences that caused it.

RAPL (Linux powercap) covers the processor packages, NVML the GPUs. Both count up by themselves; what was used between
two calls is their difference. Where neither can be read, a declared power model stands in, and everything that comes
of it is marked as estimated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from enginehouse_backends.accounting.records import ComputeShare
from enginehouse_backends.accounting.shares import split_by_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from decimal import Decimal

POWERCAP_DIR: Final = Path("/sys/class/powercap")
_UJ_PER_MJ: Final = 1000
_NS_UW_PER_UJ: Final = 10**9  # a microwatt for a nanosecond, in microjoules


class EnergyMeter(Protocol):
    """Tells the energy used since it was asked last, in microjoules."""

    @property
    def is_estimated(self) -> bool:
        """Whether the energy is declared rather than measured."""
        ...

    def take_uj(self, duration_ns: int, *, is_active: bool) -> int:
        """Return what was used since the last call, *duration_ns* ago, in which the engine computed or not."""
        ...


@dataclass(slots=True)
class PowerModel:
    """Declared power of the machine, in watts, while the engine computes and while it does not."""

    idle_watts: Decimal
    active_watts: Decimal
    is_estimated: bool = field(default=True, init=False)
    _rest: int = field(default=0, init=False)  # less than a microjoule, carried on so that nothing is lost

    def take_uj(self, duration_ns: int, *, is_active: bool) -> int:
        """See :class:`EnergyMeter`."""
        microwatts = int((self.active_watts if is_active else self.idle_watts) * 10**6)
        energy_uj, self._rest = divmod(microwatts * duration_ns + self._rest, _NS_UW_PER_UJ)
        return energy_uj


@dataclass(slots=True)
class CounterMeter:
    """Reads counters that only go up, and start again at their range."""

    read_counters_uj: Callable[[], Sequence[int]]
    ranges_uj: Sequence[int | None]
    is_estimated: bool = field(default=False, init=False)
    _last: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.read_counters_uj()

    def take_uj(self, duration_ns: int, *, is_active: bool) -> int:  # noqa: ARG002 - a counter knows by itself
        """See :class:`EnergyMeter`."""
        now = self.read_counters_uj()
        used = 0
        for new, old, range_uj in zip(now, self._last, self.ranges_uj, strict=True):
            used += new - old if new >= old or range_uj is None else new - old + range_uj
        self._last = now
        return max(0, used)


@dataclass(slots=True)
class SumOfMeters:
    """Processor and GPUs together."""

    meters: Sequence[EnergyMeter]

    @property
    def is_estimated(self) -> bool:
        """See :class:`EnergyMeter`."""
        return any(meter.is_estimated for meter in self.meters)

    def take_uj(self, duration_ns: int, *, is_active: bool) -> int:
        """See :class:`EnergyMeter`."""
        return sum(meter.take_uj(duration_ns, is_active=is_active) for meter in self.meters)


def find_meter(declared: PowerModel | None, powercap_dir: Path = POWERCAP_DIR) -> EnergyMeter | None:
    """Return the best meter of this machine: RAPL and NVML where they can be read, else *declared*.

    The declared power is the whole machine's, so it is not added to what is measured.
    """
    measured = [meter for meter in (_find_rapl(powercap_dir), _find_nvml()) if meter is not None]
    if len(measured) > 1:
        return SumOfMeters(measured)
    return measured[0] if measured else declared


def _find_rapl(powercap_dir: Path) -> CounterMeter | None:
    """The processor packages' counters; the zones below a package (``intel-rapl:0:1``) are part of it."""
    packages = [path for path in sorted(powercap_dir.glob("intel-rapl:*")) if path.name.count(":") == 1]
    counters = [path / "energy_uj" for path in packages]
    try:
        ranges = [int((path / "max_energy_range_uj").read_text(encoding="ascii")) for path in packages]
        if not counters:
            return None
        return CounterMeter(lambda: [int(path.read_text(encoding="ascii")) for path in counters], ranges)
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
        return CounterMeter(
            lambda: [int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * _UJ_PER_MJ for handle in handles],
            [None] * len(handles),
        )
    except nvml.NVMLError:
        return None


class EnergySplitter:
    """Splits time and energy over the sequences that were computed, by tokens; what is left is idle.

    The engine calls :meth:`end_step` after every step and :meth:`end_idle` when it wakes up to new work, from one
    thread. Nothing is lost or doubled: ``total`` is always what was taken, what is still open, and what was idle.
    """

    def __init__(self, meter: EnergyMeter | None, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._meter = meter
        self._clock_ns = clock_ns
        self._last_ns = clock_ns()
        self._open: dict[Hashable, ComputeShare] = {}
        self.idle = ComputeShare()
        self.total = ComputeShare()

    def end_step(self, num_tokens_by_sequence: Mapping[Any, int]) -> None:
        """Split what was used since the last call over the sequences, by the tokens that were computed for each."""
        spent = self._spend(is_active=True)
        sequences = [sequence for sequence, num_tokens in num_tokens_by_sequence.items() if num_tokens > 0]
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
        self.idle += self._spend(is_active=False)

    def take(self, sequence: Hashable) -> ComputeShare:
        """Return, once, what a sequence that has ended used."""
        return self._open.pop(sequence, ComputeShare())

    def take_idle(self) -> ComputeShare:
        """Return, once, what was idle since the last call: for the ledger's machine time."""
        taken, self.idle = self.idle, ComputeShare()
        return taken

    def _spend(self, *, is_active: bool) -> ComputeShare:
        now_ns = self._clock_ns()
        duration_ns, self._last_ns = now_ns - self._last_ns, now_ns
        meter = self._meter
        energy_uj = 0 if meter is None else meter.take_uj(duration_ns, is_active=is_active)
        spent = ComputeShare(energy_uj, duration_ns, meter is not None and meter.is_estimated)
        self.total += spent
        return spent
