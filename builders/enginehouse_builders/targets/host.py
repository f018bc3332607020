"""Whether this host can build a target: TensorRT-LLM, its version, GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from typing import TYPE_CHECKING, Final

from enginehouse_builders.targets.emitted import ENGINE_VERSION, OLDEST_LLM_API

if TYPE_CHECKING:
    from enginehouse_builders.spec.model import Spec
    from enginehouse_contract.manifest import Target

_QUERY_TIMEOUT_S: Final = 20


def missing_on_this_host(spec: Spec, target: Target) -> list[str]:
    """Return what this host lacks to build *target* of *spec*, a sentence each; empty when it can."""
    found = _version_problems(target, _installed_version())
    needed, here = spec.parallelism.world_size, _num_gpus()
    if here < needed:
        found.append(f"{needed} NVIDIA GPU{'s' if needed > 1 else ''} (one for each rank): {here or 'none'} here.")
    return found


def _version_problems(target: Target, installed: str | None) -> list[str]:
    wanted = ENGINE_VERSION if target == "tensorrt_llm" else "1.2 or newer"
    if installed is None:
        return [f"the Python package tensorrt_llm ({wanted}): not installed here."]
    release = tuple(map(int, re.findall(r"\d+", installed)[:3]))
    if target == "tensorrt_llm_pytorch":
        return [] if release >= OLDEST_LLM_API else [f"tensorrt_llm {wanted}: {installed} is installed here."]
    if installed == ENGINE_VERSION:
        return []
    if release > tuple(map(int, ENGINE_VERSION.split("."))):
        removed = (
            f"tensorrt_llm {ENGINE_VERSION}: {installed} is installed here. NVIDIA removed TensorRT engines after "
            f"{ENGINE_VERSION} (`trtllm-build` and the C++ backend are gone); build in the pinned container, "
            "or take the target `tensorrt_llm_pytorch`, which newer versions serve."
        )
        return [removed]
    return [f"tensorrt_llm {ENGINE_VERSION}: {installed} is installed here."]


def _installed_version() -> str | None:
    try:
        return metadata.version("tensorrt_llm")
    except metadata.PackageNotFoundError:
        return None


def _num_gpus() -> int:
    """GPUs that NVIDIA's driver lists; 0 where there is no driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        listing = subprocess.run(  # noqa: S603 - a fixed command
            [command, "--list-gpus"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
