"""The compatibility gate: can this host load the build at all, and if not, why not.

A TensorRT-LLM engine loads only under the release that built it, on the GPU architecture it was built for, with as many
GPUs as it has ranks. OpenVINO reads models of its own and of earlier releases.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.gates.record import GateResult
from enginehouse_contract.errors import BuildIntegrityError
from enginehouse_contract.manifest import CONFIG_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from enginehouse_builders.gates.host import Host
    from enginehouse_builders.gates.record import Value
    from enginehouse_contract.manifest import Manifest

_RUNTIME: Final = {"cpu": "openvino", "tensorrt_llm": "tensorrt_llm", "tensorrt_llm_pytorch": "tensorrt_llm"}
_MIN_DRIVERS: Final = ((13, "580"), (12, "525"))
"""CUDA's major version -> the oldest driver of its minor-version compatibility (CUDA release notes, table 2)."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a build needs of a host; None: it does not say, or does not care."""

    target: str
    runtime: str
    runtime_version: str | None
    sm: int | None
    cuda_version: str | None
    world_size: int


def needs_of(manifest: Manifest, config: dict[str, Any]) -> Needs:
    """Read what a build needs from its manifest and its engine's ``config.json``."""
    runtime = _RUNTIME[manifest.target]
    mapping = config.get("pretrained_config", {}).get("mapping", {})
    architecture = re.sub(r"\D", "", manifest.tool_versions.get("gpu_architecture", ""))
    return Needs(
        target=manifest.target,
        runtime=runtime,
        runtime_version=manifest.tool_versions.get(runtime),
        sm=int(architecture) if architecture else None,
        cuda_version=manifest.tool_versions.get("cuda"),
        world_size=int(mapping.get("world_size", 1)),
    )


def read_config(build_dir: Path) -> dict[str, Any]:
    """Return a build's ``config.json``; raise :class:`BuildIntegrityError` when it is not an object."""
    path = build_dir / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildIntegrityError(f"{path} cannot be read ({error}); rebuild.") from error
    if not isinstance(config, dict):
        raise BuildIntegrityError(f"{path} does not hold an object; rebuild.")
    return config


def compatibility_gate(needs: Needs, host: Host) -> GateResult:
    """Say every reason why *host* cannot load a build with these *needs*."""
    installed = host.runtime_versions.get(needs.runtime)
    reasons = [*_runtime_reasons(needs, installed), *([] if needs.target == "cpu" else _gpu_reasons(needs, host))]
    numbers: dict[str, Value] = {
        "target": needs.target,
        "runtime": needs.runtime,
        "runtime_version": installed,
        "num_gpus": len(host.gpus),
        "sm": host.gpus[0].sm if host.gpus else None,
        "driver": host.gpus[0].driver if host.gpus else None,
    }
    thresholds: dict[str, Value] = {
        "runtime_version": needs.runtime_version,
        "sm": needs.sm,
        "cuda_version": needs.cuda_version,
        "world_size": needs.world_size,
    }
    reason = "; ".join(reasons) or f"{needs.runtime} {installed} loads it"
    return GateResult("compatibility", "failed" if reasons else "passed", reason, numbers, thresholds)


def _runtime_reasons(needs: Needs, installed: str | None) -> list[str]:
    name, built = needs.runtime, needs.runtime_version
    if installed is None:
        wanted = f"{name} {built}" if built else name
        return [f"it was built for {name}, which is not installed here; install {wanted}, or use a host that has it"]
    if built is None:
        return []
    if needs.target == "tensorrt_llm" and installed != built:
        return [f"it was built by {name} {built}, and engines load under that release only; here is {installed}"]
    if _release(installed) < _release(built):
        return [f"it was built by {name} {built}, and here is the older {installed}; upgrade it, or rebuild here"]
    return []


def _gpu_reasons(needs: Needs, host: Host) -> list[str]:
    if not host.gpus:
        return [f"it needs {_gpus(needs.world_size)}, and no NVIDIA driver answers here"]
    reasons = []
    if len(host.gpus) < needs.world_size:
        reasons.append(f"it needs {_gpus(needs.world_size)}, one for each rank; here is {len(host.gpus)}")
    others = sorted({gpu.sm for gpu in host.gpus[: needs.world_size]} - {needs.sm})
    if needs.sm is not None and others:
        here = ", ".join(f"SM {sm}" for sm in others)
        reasons.append(f"it was built for GPUs of SM {needs.sm}, and here is {here}; build it on this kind of GPU")
    driver = host.gpus[0].driver
    oldest = _oldest_driver(needs.cuda_version)
    if oldest is not None and _release(driver) < _release(oldest):
        reasons.append(f"CUDA {needs.cuda_version} needs driver {oldest} or newer, and here is {driver}; upgrade it")
    return reasons


def _oldest_driver(cuda_version: str | None) -> str | None:
    if cuda_version is None:
        return None
    major = _release(cuda_version)[0]
    return next((driver for cuda, driver in _MIN_DRIVERS if major >= cuda), None)


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2026, 4) of 2026.4.1, for a patch never decides."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) or (0,)


def _gpus(count: int) -> str:
    return "a GPU" if count == 1 else f"{count} GPUs"
