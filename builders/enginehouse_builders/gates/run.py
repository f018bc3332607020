"""All gates over one build, cheap ones first; after a failure the rest are skipped and say so."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginehouse_builders.gates.agreement import agreement_gate, gives_logits
from enginehouse_builders.gates.asking import NUM_ANSWER_TOKENS
from enginehouse_builders.gates.compatibility import compatibility_gate, needs_of, read_config
from enginehouse_builders.gates.cost import cost_gate
from enginehouse_builders.gates.host import describe_host
from enginehouse_builders.gates.load import load_gate
from enginehouse_builders.gates.memory import memory_gate, plan_of
from enginehouse_builders.gates.numeric import MAX_PROMPT_TOKENS, numeric_gate
from enginehouse_builders.gates.prompts import shipped_prompts
from enginehouse_builders.gates.record import GateRecord, GateResult
from enginehouse_builders.gates.service_pool import ServicePool
from enginehouse_builders.gates.speed import PromptMaker, SpeedRun, Trace, speed_gate
from enginehouse_builders.gates.tokenizers import encode_prompts, tokenizer_difference
from enginehouse_builders.spec.model import Costs, Gates
from enginehouse_contract.errors import (
    BuildIntegrityError,
    ConfigurationError,
    EnginehouseError,
    ServerUnreachableError,
)
from enginehouse_contract.manifest import verify_build

if TYPE_CHECKING:
    from collections.abc import Callable

    from enginehouse_builders.gates.host import Host
    from enginehouse_builders.gates.prompts import Prompt
    from enginehouse_builders.gates.record import Gate, Value
    from enginehouse_builders.gates.services import EngineService, GateTools
    from enginehouse_builders.gates.tokenizers import EncodedPrompt
    from enginehouse_builders.plan.memory import MemoryPlan
    from enginehouse_builders.store import StoredBuild

SHIPPED: Final = "shipped"
OWN: Final = "own"
_SCRATCH: Final = "enginehouse-gate-"


@dataclass(frozen=True, slots=True)
class GateOptions:
    """What to hold a build against. ``own_prompts`` come beside the shipped ones."""

    thresholds: Gates = field(default_factory=Gates)
    costs: Costs = field(default_factory=Costs)
    own_prompts: tuple[Prompt, ...] = ()
    trace: Trace = field(default_factory=Trace)
    scratch_dir: Path | None = None  # None: where temporary files go; half a gigabyte for a vocabulary of 50,000


class GateRun:
    """One run of all gates over *build*, compared with *reference* where there is one; *report* hears each gate."""

    def __init__(
        self,
        tools: GateTools,
        build: StoredBuild,
        reference: StoredBuild | None = None,
        options: GateOptions | None = None,
        report: Callable[[Gate, float], None] = lambda _gate, _fraction: None,
    ) -> None:
        self._tools = tools
        self._build = build
        self._reference = reference
        self._options = options or GateOptions()
        self._report = report
        self._host = describe_host()
        self._pool = ServicePool(tools)
        self._prompts: dict[str, tuple[EncodedPrompt, ...]] = {}
        self._speed_run: SpeedRun | None = None

    def run(self) -> GateRecord:
        """Run the gates and return the record.

        Raises what says nothing about the build: :class:`ConfigurationError` or :class:`BuildIntegrityError` when the
        reference cannot be one or a prompt does not fit, :class:`ServerUnreachableError` when the server is gone.
        """
        started_at = datetime.now(tz=timezone.utc).isoformat(timespec="seconds")
        self._check_reference()
        gates: dict[Gate, Callable[[], GateResult]] = {
            "integrity": self._integrity,
            "compatibility": self._compatibility,
            "memory": self._memory,
            "load": self._load,
            "numeric": self._numeric,
            "speed": self._speed,
            "cost": self._cost,
        }
        results: list[GateResult] = []
        with self._pool:
            for gate, check in gates.items():
                failed = next((result.gate for result in results if result.status == "failed"), None)
                if failed is not None:
                    results.append(GateResult(gate, "skipped", f"the {failed} gate failed before it"))
                    continue
                self._report(gate, len(results) / len(gates))
                results.append(_checked(gate, check))
        return GateRecord(
            build_id=self._build.manifest.build_id,
            model_name=self._build.manifest.model_name,
            against_build_id=None if self._reference is None else self._reference.manifest.build_id,
            host_kind=self._host.kind,
            host=_values_of(self._host),
            started_at=started_at,
            tool_versions={"enginehouse": metadata.version("enginehouse"), **self._host.runtime_versions},
            results=tuple(results),
        )

    def _check_reference(self) -> None:
        if self._reference is None:
            return
        try:
            manifest = verify_build(self._reference.build_dir)
            compatibility = self._compatibility_of(self._reference)
        except BuildIntegrityError as error:
            raise BuildIntegrityError(f"the reference cannot be compared with: {error}") from error
        if compatibility.status == "failed":
            raise ConfigurationError(
                f"the reference {manifest.build_id[:19]} does not load here: {compatibility.reason}."
            )

    def _encode_prompts(self) -> None:
        """Cut both sets to what leaves room for answers in both builds, whose logits are asked for with the answers."""
        manifests = [build.manifest for build in (self._build, self._reference) if build is not None]
        room = min(min(m.limits.max_input_len, m.limits.max_seq_len - 1) for m in manifests) - NUM_ANSWER_TOKENS
        encoder = self._tools.encoder(self._build)
        for name, prompts in self._prompt_sets().items():
            encoded = encode_prompts(prompts, encoder, max(min(room, MAX_PROMPT_TOKENS), 0))
            if not encoded:
                raise ConfigurationError(f"the {name} prompts hold none that the builds have room for.")
            self._prompts[name] = encoded

    def _prompt_sets(self) -> dict[str, tuple[Prompt, ...]]:
        own = self._options.own_prompts
        return {SHIPPED: shipped_prompts(), **({OWN: own} if own else {})}

    def _integrity(self) -> GateResult:
        manifest = verify_build(self._build.build_dir)
        num_bytes = sum(record.num_bytes for record in manifest.files.values())
        numbers: dict[str, Value] = {"num_files": len(manifest.files), "num_bytes": num_bytes}
        return GateResult("integrity", "passed", f"{len(manifest.files)} files are what the manifest says", numbers)

    def _compatibility(self) -> GateResult:
        return self._compatibility_of(self._build)

    def _compatibility_of(self, build: StoredBuild) -> GateResult:
        return compatibility_gate(needs_of(build.manifest, read_config(build.build_dir)), self._host)

    def _memory(self) -> GateResult:
        """Also decide whether both builds may be loaded at once."""
        plan = self._plan_of(self._build)
        if self._reference is not None:
            both_bytes = plan.least_bytes + self._plan_of(self._reference).least_bytes
            self._pool.max_served = 2 if both_bytes <= plan.available_bytes else 1
        return memory_gate(plan)

    def _plan_of(self, build: StoredBuild) -> MemoryPlan:
        return plan_of(build, read_config(build.build_dir), self._host)

    def _load(self) -> GateResult:
        self._encode_prompts()
        return load_gate(self._open_build, self._build, self._prompts[SHIPPED][0].token_ids)

    def _numeric(self) -> GateResult:
        limits = self._options.thresholds.numeric
        difference = self._tokenizer_difference()
        if difference is not None:
            return GateResult("numeric", "failed", difference)
        builds = [build for build in (self._build, self._reference) if build is not None]
        open_reference = None if self._reference is None else self._open_reference
        if not all(gives_logits(build.manifest, read_config(build.build_dir)) for build in builds):
            return agreement_gate(self._open_build, open_reference, self._prompts, limits)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self._options.scratch_dir) as scratch:
            return numeric_gate(self._open_build, open_reference, self._prompts, limits, Path(scratch))

    def _tokenizer_difference(self) -> str | None:
        if self._reference is None:
            return None
        return tokenizer_difference(
            self._build.manifest,
            self._reference.manifest,
            [prompt for prompts in self._prompt_sets().values() for prompt in prompts],
            self._tools.encoder(self._build),
            self._tools.encoder(self._reference),
        )

    def _speed(self) -> GateResult:
        texts = [prompt.text for prompt in shipped_prompts() if prompt.text is not None]
        result, self._speed_run = speed_gate(
            self._open_build,
            None if self._reference is None else self._open_reference,
            PromptMaker(self._tools.encoder(self._build), texts),
            self._options.thresholds.speed,
            self._options.trace,
        )
        return result

    def _cost(self) -> GateResult:
        assert self._speed_run is not None, "the speed gate came before"
        costs = self._options.costs
        num_devices = needs_of(self._build.manifest, read_config(self._build.build_dir)).world_size
        machine_hour = None if costs.machine_hour is None else costs.machine_hour * num_devices
        return cost_gate(self._speed_run, self._options.thresholds.cost, machine_hour, costs.currency)

    def _open_build(self) -> EngineService:
        return self._pool.get(self._build)

    def _open_reference(self) -> EngineService:
        assert self._reference is not None, "asked for only where there is one"
        try:
            return self._pool.get(self._reference)
        except EnginehouseError as error:
            raise type(error)(f"the reference: {error}") from error


def _checked(gate: Gate, check: Callable[[], GateResult]) -> GateResult:
    """Run one gate; what it raises is its failure, unless it says nothing about the build: prompts, or no server."""
    start_s = time.perf_counter()
    try:
        result = check()
    except (ConfigurationError, ServerUnreachableError):
        raise
    except EnginehouseError as error:
        result = GateResult(gate, "failed", str(error).rstrip("."))
    return replace(result, duration_s=round(time.perf_counter() - start_s, 3))


def _values_of(host: Host) -> dict[str, Value]:
    gpu = host.gpus[0] if host.gpus else None
    return {
        "cpu": host.cpu_name,
        "num_cores": host.num_cores,
        "available_bytes": host.available_bytes,
        "num_gpus": len(host.gpus),
        "gpu": gpu.name if gpu else None,
        "driver": gpu.driver if gpu else None,
    }
