"""One plan: a model, as a spec asks for it, on a device. Memory, speed, money, energy, and warnings with advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.plan.advice import warnings_of
from enginehouse_builders.plan.memory import plan_memory
from enginehouse_builders.plan.request import memory_request
from enginehouse_builders.plan.speed import plan_speed
from enginehouse_builders.spec.compatibility import device_refusals
from enginehouse_contract.errors import ConfigurationError
from enginehouse_contract.money import format_amount, price_of_seconds

if TYPE_CHECKING:
    from enginehouse_builders.plan.advice import PlanWarning
    from enginehouse_builders.plan.devices import Device
    from enginehouse_builders.plan.memory import MemoryPlan
    from enginehouse_builders.plan.request import MemoryRequest
    from enginehouse_builders.plan.shape import ModelShape
    from enginehouse_builders.plan.speed import SpeedPlan, Workload
    from enginehouse_builders.spec.model import Spec
    from enginehouse_contract.manifest import Target

_MILLION_NS: Final = 10**6 * 10**9
_LENGTHS: Final = (1024, 2048, 4096, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class CostPlan:
    """Money, or None where nobody said what the machine costs. Per million tokens, of one replica at the workload."""

    currency: str
    machine_hour: Decimal | None  # of one device
    source: str  # who said so
    per_million_input_tokens: Decimal | None
    per_million_output_tokens: Decimal | None
    per_million_output_tokens_with_prompts: Decimal | None  # steady load: each answer pays for its prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """What a spec needs and gives on one device for one target."""

    model: str
    device: Device
    target: Target
    request: MemoryRequest
    workload: Workload
    num_params: int
    memory: MemoryPlan
    speed: SpeedPlan | None  # None: it does not fit
    cost: CostPlan
    joules_per_output_token: float | None
    warnings: tuple[PlanWarning, ...]

    @property
    def sequences_by_length(self) -> dict[int, int]:
        """Tokens of a sequence -> how many such sequences the KV pool holds at a time."""
        longest = self.request.max_seq_len
        lengths = sorted({*(length for length in _LENGTHS if length < longest), longest})
        return {length: self.memory.num_sequences_of(length) for length in lengths}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON; money as decimal strings, unknown as null."""
        memory = asdict(self.memory)
        for name in ("weights_bytes", "fixed_bytes", "kv_bytes_per_sequence", "least_bytes", "num_kv_tokens",
                     "num_full_sequences", "fits"):  # fmt: skip
            memory[name] = getattr(self.memory, name)
        memory["num_sequences_by_length"] = {str(length): num for length, num in self.sequences_by_length.items()}
        request = self.request
        return {
            "model": self.model,
            "device": self.device.name,
            "num_devices": request.parallelism.world_size,
            "device_source": self.device.source,
            "target": self.target,
            "num_params": self.num_params,
            "weights": request.weights.value,
            "dtype": request.dtype.value,
            "kv": request.kv.value,
            "limits": {
                "max_batch_size": request.max_batch_size,
                "max_seq_len": request.max_seq_len,
                "max_num_tokens": request.max_num_tokens,
            },
            "workload": asdict(self.workload),
            "memory": memory,
            "speed": None if self.speed is None else asdict(self.speed),
            "cost": {
                name: str(value) if isinstance(value, Decimal) else value for name, value in asdict(self.cost).items()
            },
            "joules_per_output_token": self.joules_per_output_token,
            "warnings": [asdict(warning) for warning in self.warnings],
        }


def targets_on(spec: Spec, device: Device) -> list[Target]:
    """Return the spec's targets that run on *device*.

    Raises :class:`ConfigurationError` when that is none of them.
    """
    found = [target for target in spec.targets if (target == "cpu") is device.is_cpu]
    if not found:
        runs = "cpu" if device.is_cpu else "tensorrt_llm and tensorrt_llm_pytorch"
        msg = f"`device` {device.name} runs the targets {runs}; the spec's targets are {', '.join(spec.targets)}."
        raise ConfigurationError(f"{msg} Add a target to the spec, or name another --device.")
    return found


def make_plan(
    spec: Spec,
    shape: ModelShape,
    device: Device,
    target: Target,
    workload: Workload,
    *,
    machine_hour: Decimal | None = None,
    watts: float | None = None,
    draft: ModelShape | None = None,
) -> Plan:
    """Plan *spec* for one target on one device; *machine_hour* goes before the spec's and the catalogue's price.

    What the device refuses by name raises :class:`ConfigurationError`; what does not fit is a plan with a warning.
    """
    refused = device_refusals(spec, target, device.sm, device.name) if device.sm is not None else []
    if refused:
        raise ConfigurationError(" ".join(problem.message for problem in refused))
    request = memory_request(spec, shape, target, draft)
    memory = plan_memory(shape, request, device.memory_bytes)
    speed = plan_speed(shape, request, memory, device, workload) if memory.fits else None
    cost = _cost(spec, device, speed, machine_hour)
    watts = watts if watts is not None else device.watts
    world_size = request.parallelism.world_size
    joules = watts * world_size / speed.output_tokens_per_s if speed is not None and watts is not None else None
    return Plan(
        model=spec.name,
        device=device,
        target=target,
        request=request,
        workload=workload,
        num_params=shape.num_params,
        memory=memory,
        speed=speed,
        cost=cost,
        joules_per_output_token=joules,
        warnings=warnings_of(
            spec, shape, request, memory, device, workload, is_cost_known=cost.machine_hour is not None
        ),
    )


def _cost(spec: Spec, device: Device, speed: SpeedPlan | None, machine_hour: Decimal | None) -> CostPlan:
    currency, source = spec.costs.currency, "unknown"
    if machine_hour is not None:
        source = "given"
    elif spec.costs.machine_hour is not None:
        machine_hour, source = spec.costs.machine_hour, "the spec"
    elif device.price is not None and device.price.currency == currency:
        machine_hour, source = device.price.per_hour, device.price.source
    if machine_hour is None or speed is None:
        return CostPlan(currency, machine_hour, source, None, None, None)
    replica_hour = machine_hour * spec.parallelism.world_size

    def per_million(tokens_per_s: float) -> Decimal:
        return Decimal(format_amount(price_of_seconds(round(_MILLION_NS / tokens_per_s), replica_hour)))

    return CostPlan(
        currency=currency,
        machine_hour=machine_hour,
        source=source,
        per_million_input_tokens=per_million(speed.prefill_tokens_per_s),
        per_million_output_tokens=per_million(speed.decode_tokens_per_s),
        per_million_output_tokens_with_prompts=per_million(speed.output_tokens_per_s),
    )
