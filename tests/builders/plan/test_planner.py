"""Whole plans: devices, money, and the known mistakes with advice that works when followed."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.model_configs import write_config

from enginehouse_builders.plan.devices import Device, device_names, gpu
from enginehouse_builders.plan.planner import Plan, make_plan, targets_on
from enginehouse_builders.plan.probe import measure_cpu
from enginehouse_builders.plan.reading import read_shape
from enginehouse_builders.plan.speed import Workload
from enginehouse_builders.spec.model import Spec
from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

_CPU = Device("cpu", 16 << 30, 12e9, 70e9, "a test")


def _spec(target: str = "tensorrt_llm", **parts: Any) -> Spec:
    return Spec.model_validate({"name": "m", "model": {"source": "m"}, "targets": [target], **parts})


def _plan(folder: Path, model: str, where: str | Device, workload: Workload | None = None, **parts: Any) -> Plan:
    found = gpu(where) if isinstance(where, str) else where
    spec = _spec("cpu" if found.is_cpu else "tensorrt_llm", **parts)
    shape = read_shape(write_config(folder, model))
    return make_plan(spec, shape, found, spec.targets[0], workload or Workload())


def _codes(plan: Plan) -> set[str]:
    return {warning.code for warning in plan.warnings}


def test_catalogue_is_whole() -> None:
    """Every device has memory, bandwidth, compute, an architecture, power and a source; aliases lead to devices."""
    for name in device_names()[1:]:
        device = gpu(name)
        assert min(device.memory_bytes, device.bytes_per_s, device.f16_flops, device.watts or 0) > 0
        assert device.sm is not None
        assert device.source
        assert device.price is None or (device.price.per_hour > 0 and device.price.source)
    assert gpu("H100") == gpu("h100-sxm")


def test_unknown_device_names_the_nearest() -> None:
    """A device that is not in the catalogue is refused with the nearest that is."""
    with pytest.raises(ConfigurationError, match="did you mean `h100`"):
        gpu("h1000")


@pytest.mark.parametrize(
    ("model", "device"),
    [("llama-3.1-70b", "h100"), ("llama-3.1-8b", "l4"), ("llama-2-70b", "l40s"), ("llama-3.1-70b", "a100")],
)
def test_what_does_not_fit_says_what_would(tmp_path: Path, model: str, device: str) -> None:
    """Each way out that is offered does fit when it is taken: quantization, shorter sequences, more GPUs."""
    plan = _plan(tmp_path, model, device)
    warning = next(one for one in plan.warnings if one.code == "does_not_fit")
    assert plan.speed is None
    assert warning.severity == "error"
    ways = warning.advice.split("; or ")
    for way in ways:
        parts: dict[str, dict[str, Any]] = {}
        for section, key, value in re.findall(r"`(\w+)\.(\w+): (\w+)`", way):
            parts.setdefault(section, {})[key] = int(value) if value.isdigit() else value
        if match := re.search(r"max_seq_len` to ([\d,]+) at most", way):
            parts["limits"] = {"max_seq_len": int(match[1].replace(",", ""))}
        assert parts, way
        assert _plan(tmp_path, model, device, **parts).memory.fits, way
    assert any("GPUs" in way for way in ways)


def test_what_cannot_fit_at_all_must_be_offloaded(tmp_path: Path) -> None:
    """Where no quantization and no number of ranks helps, the plan says how much must go elsewhere."""
    small = Device("cpu", 4 << 30, 12e9, 70e9, "a test")
    plan = _plan(tmp_path, "llama-3.1-405b", small)
    assert "offload" in next(one for one in plan.warnings if one.code == "does_not_fit").advice


def test_ignored_kv_is_computed(tmp_path: Path) -> None:
    """A batch whose sequences cannot all be full says how many can, and up to which length all do."""
    plan = _plan(tmp_path, "llama-3.1-8b", "h100", limits={"max_batch_size": 256, "max_seq_len": 8192})
    advice = next(one for one in plan.warnings if one.code == "kv_ignored").advice
    length = int(re.findall(r"under ([\d,]+) tokens", advice)[0].replace(",", ""))
    assert plan.memory.num_sequences_of(length - 32) >= 256
    assert plan.memory.num_full_sequences < 256
    assert f"to {plan.memory.num_full_sequences}," in advice


def test_known_mistakes_are_warned_of(tmp_path: Path) -> None:
    """Batch 1, a limit far over need, one under it, one over the window, and no cost are each found, and only then."""
    good = _plan(tmp_path, "llama-3.1-8b", "h100", limits={"max_batch_size": 64, "max_seq_len": 4096})
    assert _codes(good) == set()
    assert "batch_of_one" in _codes(_plan(tmp_path, "llama-3.1-8b", "h100", limits={"max_batch_size": 1}))
    long = _plan(tmp_path, "llama-3.1-8b", "h200", limits={"max_batch_size": 4})
    assert "max_seq_len_far_over_need" in _codes(long)
    assert "max_seq_len_under_need" in _codes(_plan(tmp_path, "llama-3.1-8b", "h100", limits={"max_seq_len": 512}))
    over = _plan(tmp_path, "llama-2-7b", "h100", limits={"max_seq_len": 8192})
    assert "max_seq_len_over_window" in _codes(over)
    assert "no_cost_tracking" in _codes(_plan(tmp_path, "llama-3.1-8b", "gb200"))


def test_a_draft_larger_than_its_target(tmp_path: Path) -> None:
    """A draft model as large as the target is an error; one of another vocabulary too."""
    target = read_shape(write_config(tmp_path, "llama-3.1-8b"))
    draft = read_shape(write_config(tmp_path, "llama-2-13b"))
    plan = make_plan(_spec(), target, gpu("h200"), "tensorrt_llm", Workload(), draft=draft)
    assert {"draft_larger_than_target", "draft_of_another_vocabulary"} <= _codes(plan)


def test_an_engine_for_another_architecture(tmp_path: Path) -> None:
    """A spec whose engine is built for one GPU warns on a GPU of another architecture, and not on its like."""
    assert "other_architecture" in _codes(_plan(tmp_path, "llama-3.1-8b", "l40s", device="h100"))
    assert "other_architecture" not in _codes(_plan(tmp_path, "llama-3.1-8b", "h200", device="h100"))


def test_a_gpu_refuses_by_name_what_it_has_no_kernels_for(tmp_path: Path) -> None:
    """fp8 weights on an A100, int8 on a B200, and anything on a T4 are refused with the architecture."""
    for device, weights, said in (("a100", "fp8", "SM 80"), ("b200", "int8", "SM 100"), ("t4", "int8", "older than")):
        with pytest.raises(ConfigurationError, match=said):
            _plan(tmp_path, "llama-3.1-8b", device, quantization={"weights": weights})


def test_targets_follow_the_device() -> None:
    """A CPU plans the target `cpu`, a GPU the others; a spec without such a target is refused."""
    assert targets_on(_spec("cpu"), _CPU) == ["cpu"]
    with pytest.raises(ConfigurationError, match="spec's targets are cpu"):
        targets_on(_spec("cpu"), gpu("h100"))


def test_money_is_exact_and_never_invented(tmp_path: Path) -> None:
    """The given price goes before the spec's, the spec's before the catalogue's; unknown stays unknown, as null."""
    shape = read_shape(write_config(tmp_path, "llama-3.1-8b"))
    spec = _spec(costs={"machine_hour": "3.00"}, parallelism={"tensor": 2})
    given = make_plan(spec, shape, gpu("h100"), "tensorrt_llm", Workload(), machine_hour=Decimal("6.00"))
    own = make_plan(spec, shape, gpu("h100"), "tensorrt_llm", Workload())
    assert (given.cost.source, own.cost.source) == ("given", "the spec")
    assert given.cost.per_million_output_tokens is not None
    assert own.cost.per_million_output_tokens is not None
    assert given.cost.per_million_output_tokens == pytest.approx(2 * own.cost.per_million_output_tokens)
    assert own.speed is not None
    expected = Decimal(6) / Decimal(str(own.speed.decode_tokens_per_s)) / 3600 * 10**6
    assert abs(own.cost.per_million_output_tokens - expected) < Decimal("1e-6")
    euros = make_plan(_spec(costs={"currency": "EUR"}), shape, gpu("h100"), "tensorrt_llm", Workload())
    assert euros.cost.machine_hour is None
    assert euros.to_dict()["cost"]["per_million_output_tokens"] is None


def test_energy_is_power_over_rate(tmp_path: Path) -> None:
    """Joules per output token are the power of all ranks over their rate; a CPU's power is unknown."""
    plan = _plan(tmp_path, "llama-3.1-8b", "h100", parallelism={"tensor": 2})
    assert plan.speed is not None
    assert plan.joules_per_output_token == pytest.approx(1400 / plan.speed.output_tokens_per_s)
    assert _plan(tmp_path, "qwen2.5-0.5b", _CPU).joules_per_output_token is None


def test_this_cpu_is_measured_once(tmp_path: Path) -> None:
    """The first plan measures this CPU and writes it down; the next reads it; damage means measuring again."""
    first = measure_cpu(tmp_path)
    files = list((tmp_path / "devices").iterdir())
    assert len(files) == 1
    assert min(first.bytes_per_s, first.f16_flops, first.memory_bytes) > 0
    second = measure_cpu(tmp_path)
    assert (second.bytes_per_s, second.f16_flops) == (first.bytes_per_s, first.f16_flops)
    files[0].write_text("{", encoding="utf-8")
    assert measure_cpu(tmp_path).bytes_per_s > 0
    assert files[0].read_text(encoding="utf-8") != "{"
