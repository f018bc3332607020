"""Energy: every microjoule that was measured is someone's, or idle; nothing is lost and nothing is made up."""

from __future__ import annotations

import random
import sys
import types
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from enginehouse_backends.accounting.energy import CounterMeter, EnergySplitter, PowerModel, find_meter
from enginehouse_backends.accounting.machine_clock import OwnClock, SharedClock
from enginehouse_backends.accounting.records import ComputeShare
from enginehouse_backends.accounting.shares import split_by_weight

if TYPE_CHECKING:
    from pathlib import Path

SECOND_NS = 10**9


@pytest.mark.parametrize("seed", range(50))
def test_a_split_adds_up_and_each_part_is_within_one_of_its_share(seed: int) -> None:
    """Whatever the total and the weights; a weight of 0 gets nothing."""
    rng = random.Random(seed)
    weights = [rng.choice((0, 1, rng.randrange(1, 10**6))) for _ in range(rng.randrange(1, 40))] + [1]
    total = rng.randrange(0, 10 ** rng.randrange(1, 15))
    parts = split_by_weight(total, weights)

    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - Fraction(total * weight, sum(weights))) < 1
        assert weight or not part


@pytest.mark.parametrize("seed", range(20))
def test_time_and_energy_are_conserved(seed: int) -> None:
    """Taken, still open and idle add up to the total after every call, in whole microjoules and nanoseconds."""
    rng = random.Random(seed)
    now_ns = 0
    counter = 0
    splitter = EnergySplitter(CounterMeter(lambda: [counter], [None]), OwnClock([0], lambda: now_ns))
    taken = ComputeShare()
    num_reported_ns = 0
    for _ in range(400):
        now_ns += rng.randrange(0, 10**8)
        counter += rng.randrange(0, 10**7)
        if rng.random() < 0.2:
            splitter.end_idle()
        else:
            splitter.end_step({rng.randrange(12): rng.randrange(0, 50) for _ in range(rng.randrange(0, 8))})
        if rng.random() < 0.3:
            taken += splitter.take(rng.randrange(12))
        if rng.random() < 0.1:
            uptime_ns, idle = splitter.take_idle()
            num_reported_ns += uptime_ns
            taken += idle
        still_open = sum(splitter._open.values(), start=ComputeShare())
        assert taken + still_open + splitter.idle == splitter.total

    assert splitter.total == ComputeShare(counter, now_ns)
    assert num_reported_ns + splitter.take_idle()[0] == now_ns


def test_a_step_is_split_by_tokens_computed() -> None:
    """A prompt's 30 tokens cost three times a batch of ten single ones; a sequence without tokens gets nothing."""
    now_ns = 0
    splitter = EnergySplitter(PowerModel(Decimal(10), Decimal(40)), OwnClock(clock_ns=lambda: now_ns))
    now_ns = SECOND_NS
    splitter.end_idle()
    now_ns = 2 * SECOND_NS
    splitter.end_step({"prompt": 30, "waiting": 0, **{f"decode {index}": 1 for index in range(10)}})

    assert splitter.take("prompt") == ComputeShare(30_000_000, 750_000_000, is_estimated=True)
    assert splitter.take("decode 3") == ComputeShare(1_000_000, 25_000_000, is_estimated=True)
    assert splitter.take("waiting") == splitter.take("prompt") == ComputeShare()
    assert splitter.take_idle() == (2 * SECOND_NS, ComputeShare(10_000_000, SECOND_NS, is_estimated=True))
    assert splitter.take_idle() == (0, ComputeShare())


def test_a_declared_power_loses_nothing_to_rounding() -> None:
    """Ten thousand steps of a third of a microjoule each."""
    model = PowerModel(Decimal(0), Decimal("0.333333"))

    assert sum(model.used_uj([], [], 1000, is_active=True) for _ in range(10_000)) == 3333


def test_counters_that_wrap_go_on() -> None:
    """RAPL's counters start again at their range."""
    meter = CounterMeter(list, [100, None])

    assert meter.used_uj([90, 5], [10, 6], 0, is_active=True) == 20 + 1
    assert meter.used_uj([10, 6], [20, 7], 0, is_active=False) == 10 + 1
    assert not meter.is_estimated


def rapl(folder: Path, name: str, energy_uj: str) -> None:
    """Make a powercap zone."""
    zone = folder / name
    zone.mkdir()
    (zone / "energy_uj").write_text(energy_uj)
    (zone / "max_energy_range_uj").write_text("262143328850\n")


def test_rapl_counts_packages_once(tmp_path: Path) -> None:
    """A package's parts (cores, memory) are within it."""
    rapl(tmp_path, "intel-rapl:0", "1000\n")
    rapl(tmp_path, "intel-rapl:0:0", "700\n")
    rapl(tmp_path, "intel-rapl:1", "2000\n")
    meter = find_meter(None, tmp_path)
    assert meter is not None
    before = meter.read_counters()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("1500\n")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("999\n")

    assert meter.used_uj(before, meter.read_counters(), SECOND_NS, is_active=True) == 500
    assert not meter.is_estimated


def test_without_a_readable_counter_the_declared_power_stands_in(tmp_path: Path) -> None:
    """And what comes of it is marked; without a declaration there is no energy at all."""
    rapl(tmp_path, "intel-rapl:0", "not a number\n")
    declared = PowerModel(Decimal(10), Decimal(40))

    assert find_meter(declared, tmp_path) is declared
    assert declared.is_estimated
    assert find_meter(None, tmp_path) is None


def test_gpus_are_added_to_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts in millijoules."""
    rapl(tmp_path, "intel-rapl:0", "0\n")
    millijoules = [1000, 2000]
    nvml = types.SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(millijoules),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda index: millijoules[index],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = find_meter(None, tmp_path)
    assert meter is not None
    before = meter.read_counters()
    millijoules[1] += 3
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("7\n")

    assert meter.used_uj(before, meter.read_counters(), SECOND_NS, is_active=True) == 3007
    assert not meter.is_estimated


def test_engines_on_one_machine_share_its_time_and_energy(tmp_path: Path) -> None:
    """Each interval is one engine's; together they have what the counter and the clock say, however they interleave."""
    counter = 1000
    meter = CounterMeter(lambda: [counter], [None])
    started_ns = SharedClock.now_ns()
    clocks = [SharedClock(tmp_path, meter.read_counters()) for _ in range(3)]
    splitters = [EnergySplitter(meter, clock) for clock in clocks]
    rng = random.Random(5)
    for _ in range(200):
        counter += rng.randrange(100)
        rng.choice(splitters).end_step({"sequence": 1})

    assert sum(splitter.total.energy_uj for splitter in splitters) == counter - 1000
    with clocks[0].exclusive() as last:
        assert sum(splitter.total.machine_ns for splitter in splitters) <= last.at_ns - started_ns
    for clock in clocks:
        clock.close()


def test_the_time_in_which_no_engine_ran_is_nobodys(tmp_path: Path) -> None:
    """The first engine after a pause begins anew; one that joins others does not."""
    counter = 0
    meter = CounterMeter(lambda: [counter], [None])
    first = SharedClock(tmp_path, meter.read_counters())
    EnergySplitter(meter, first).end_step({"sequence": 1})
    first.close()
    counter = 500  # while nobody ran
    second = SharedClock(tmp_path, meter.read_counters())
    counter = 510
    third = SharedClock(tmp_path, meter.read_counters())
    splitter = EnergySplitter(meter, third)
    splitter.end_step({"sequence": 1})

    assert splitter.total.energy_uj == 10
    second.close()
    third.close()


def test_a_counter_that_cannot_be_read_now_is_caught_up_with() -> None:
    """A step goes on without it; the next reading has what was missed."""
    readings = iter([[0], OSError("gone for a moment"), [70]])

    def read() -> list[int]:
        reading = next(readings)
        if isinstance(reading, OSError):
            raise reading
        return reading

    splitter = EnergySplitter(CounterMeter(read, [None]))
    splitter.end_step({"a": 1})
    splitter.end_step({"b": 1})

    assert (splitter.take("a").energy_uj, splitter.take("b").energy_uj) == (0, 70)
