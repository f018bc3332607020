"""The host that gates run on: its kind, by which records are found, and what decides whether a build loads here."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

_RUNTIMES: Final = ("openvino", "tensorrt_llm", "tensorrt")
_QUERY: Final = "name,compute_cap,driver_version,memory.total"
_CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its driver describes it."""

    name: str
    sm: int  # compute capability without the dot: 90 for 9.0
    driver: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """What is here. ``available_bytes`` is memory that a new process could have now."""

    cpu_name: str
    num_cores: int
    available_bytes: int
    gpus: tuple[Gpu, ...]
    runtime_versions: dict[str, str]  # of openvino, tensorrt_llm, tensorrt: those installed

    @property
    def kind(self) -> str:
        """A name that hosts share on which a build loads and runs alike: the processor and how many of it."""
        if self.gpus:
            return f"gpu-{_slug(self.gpus[0].name)}-x{len(self.gpus)}"
        return f"cpu-{_slug(self.cpu_name)}-x{self.num_cores}"


def describe_host() -> Host:
    """Look at this host."""
    return Host(
        cpu_name=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0)),
        available_bytes=_available_bytes(),
        gpus=_gpus(),
        runtime_versions=_runtime_versions(),
    )


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu", " ", name.lower())).strip("-")


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _available_bytes() -> int:
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
        available = int(match[1]) << 10 if match else available
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
            available = min(available, int(Path(path).read_text(encoding="ascii")))
    return available


def _gpus() -> tuple[Gpu, ...]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        found = subprocess.run(  # noqa: S603 - the driver's own tool, no shell
            [command, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            check=True,
            text=True,
            timeout=20,
        )
        return tuple(parse_gpu(line) for line in found.stdout.splitlines() if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()  # a driver that does not answer drives nothing


def parse_gpu(line: str) -> Gpu:
    """Read one line of ``nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total`` (CSV, no units).

    >>> parse_gpu("NVIDIA H100 80GB HBM3, 9.0, 550.54.15, 81559")
    Gpu(name='NVIDIA H100 80GB HBM3', sm=90, driver='550.54.15', memory_bytes=85520809984)
    """
    name, capability, driver, mebibytes = (part.strip() for part in line.rsplit(",", 3))
    return Gpu(name, int(capability.replace(".", "")), driver, int(mebibytes) << 20)


def _runtime_versions() -> dict[str, str]:
    versions = {}
    for name in _RUNTIMES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
