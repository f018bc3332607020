"""Finding a tritonserver on this host, and everything it needs to start; or saying what is missing.

Two places are known: ``/opt/tritonserver`` (NVIDIA's container) and the wheel ``nvidia-pytriton``, which carries the
binary of Triton 2.51.0, the Python backend and a stub for each Python. The wheel is a carrier only: nothing of it is
imported, and it is installed without its dependencies.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from enginehouse_contract.errors import ServerStartError

WHEEL: Final = "nvidia-pytriton"
WHEEL_VERSION: Final = "0.7.0"
CONTAINER_DIR: Final = Path("/opt/tritonserver")
SHARED_MEMORY_DIR: Final = Path("/dev/shm")  # noqa: S108 - where Triton's Python backend keeps its queues

_MIN_GLIBC: Final = (2, 35)  # the newest GLIBC_ symbol that the wheel's binary needs
_MIN_SHARED_MEMORY_BYTES: Final = 64 << 20
_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """Paths of one tritonserver."""

    binary: Path
    backend_library: Path  # of the Python backend
    backend_utilities: Path  # the module its models import
    stub: Path
    library_dirs: tuple[Path, ...]  # for LD_LIBRARY_PATH
    origin: str


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that serving needs: whether it is there, what was found, and what to do where it is not."""

    name: str
    ok: bool
    found: str
    advice: str = ""


def find_triton(container_dir: Path = CONTAINER_DIR) -> TritonInstallation:
    """Return the tritonserver to start: the container's if there is one, else the wheel's.

    Raises :class:`ServerStartError` saying what to install.
    """
    if (container_dir / "bin" / "tritonserver").is_file():
        backend = container_dir / "backends" / "python"
        return TritonInstallation(
            binary=container_dir / "bin" / "tritonserver",
            backend_library=backend / "libtriton_python.so",
            backend_utilities=backend / "triton_python_backend_utils.py",
            stub=backend / "triton_python_backend_stub",
            library_dirs=(container_dir / "lib",),
            origin=str(container_dir),
        )
    return _find_in_wheel()


def _find_in_wheel() -> TritonInstallation:
    advice = f"Install it with `pip install --no-deps {WHEEL}=={WHEEL_VERSION}`, or run inside NVIDIA's container."
    try:
        distribution = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError:
        raise ServerStartError(f"no tritonserver on this host. {advice}") from None
    root = Path(str(distribution.locate_file("pytriton/tritonserver")))
    libraries = Path(str(distribution.locate_file("nvidia_pytriton.libs")))
    binary, backend = root / "bin" / "tritonserver", root / "backends" / "python"
    if not binary.is_file():
        raise ServerStartError(f"the wheel {WHEEL} {distribution.version} holds no tritonserver. {advice}")
    stub = root / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub"
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in stub.parent.parent.glob("3.*")))
        msg = f"{WHEEL} {distribution.version} has no stub for Python {_PYTHON}; it has {known}. Use one of these."
        raise ServerStartError(msg)
    return TritonInstallation(
        binary=binary,
        backend_library=backend / "libtriton_python.so",
        backend_utilities=backend / "triton_python_backend_utils.py",
        stub=stub,
        library_dirs=(libraries,),
        origin=f"{WHEEL} {distribution.version}",
    )


def find_libpython() -> Path | None:
    """Return the folder of ``libpython3.X.so``, which the stub loads; None where this Python has no shared library."""
    name = f"libpython{_PYTHON}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix, "lib")):
        if folder and (Path(folder) / name).is_file():
            return Path(folder)
    if ctypes.util.find_library(f"python{_PYTHON}"):
        return Path()  # on the system's search path
    return None


def check_host(num_instances: int = 4, shared_memory_dir: Path = SHARED_MEMORY_DIR) -> list[Check]:
    """Return what a server with that many Python model instances needs of this host."""
    return [
        _check_triton(),
        _check_glibc(),
        _check_libpython(),
        _check_numpy(),
        _check_shared_memory(num_instances, shared_memory_dir),
    ]


def diagnose() -> list[Check]:
    """Return every check of ``enginehouse doctor``."""
    return [
        Check("python", ok=True, found=f"{platform.python_version()} at {sys.executable}"),
        Check("processor", ok=True, found=f"{os.cpu_count()} cores, {platform.machine()}"),
        *check_host(),
        _check_module("openvino", "the CPU engine cannot run; reinstall enginehouse"),
        _check_module("tokenizers", "nothing can be tokenized; reinstall enginehouse"),
        _check_module("tritonclient", "the client cannot connect; reinstall enginehouse"),
    ]


def require_host(num_instances: int = 4, shared_memory_dir: Path = SHARED_MEMORY_DIR) -> TritonInstallation:
    """Return the tritonserver to start; raise :class:`ServerStartError` with the first check that fails."""
    installation = find_triton()
    for check in check_host(num_instances, shared_memory_dir):
        if not check.ok:
            raise ServerStartError(f"{check.name}: {check.found}. {check.advice}")
    return installation


def _check_triton() -> Check:
    try:
        installation = find_triton()
    except ServerStartError as error:
        return Check("tritonserver", ok=False, found="none", advice=str(error))
    return Check("tritonserver", ok=True, found=f"{installation.binary} ({installation.origin})")


def _check_glibc(version: str | None = None) -> Check:
    version = platform.libc_ver()[1] if version is None else version
    needed = ".".join(map(str, _MIN_GLIBC))
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    advice = f"tritonserver needs glibc {needed} or newer: use Debian 12, Ubuntu 22.04 or newer, or NVIDIA's container."
    return Check("glibc", ok=parts >= _MIN_GLIBC, found=version or "none", advice=advice)


def _check_libpython() -> Check:
    folder = find_libpython()
    advice = (
        f"The server's Python stub loads libpython{_PYTHON}.so.1.0: install it (Debian: libpython{_PYTHON}), "
        "or use a Python built with --enable-shared."
    )
    found = "none" if folder is None else str(folder) if folder != Path() else "on the system's search path"
    return Check("libpython", ok=folder is not None, found=found, advice=advice)


def _check_numpy(version: str | None = None) -> Check:
    """The stub of Triton 2.51 reads arrays by numpy 1's layout; with numpy 2 it crashes on the first text.

    NVIDIA's container brings the numpy that its own stub was made for.
    """
    version = metadata.version("numpy") if version is None else version
    advice = "Triton 2.51's Python stub needs numpy 1: pip install 'numpy<2', under Python 3.10 to 3.12."
    is_container = (CONTAINER_DIR / "bin" / "tritonserver").is_file()
    return Check("numpy", ok=is_container or version.startswith("1."), found=version, advice=advice)


def _check_shared_memory(num_instances: int, folder: Path) -> Check:
    needed = _MIN_SHARED_MEMORY_BYTES + (num_instances << 20)
    if not folder.is_dir():
        return Check("shared memory", ok=False, found=f"no {folder}", advice="Mount a tmpfs there.")
    free = shutil.disk_usage(folder).free
    advice = f"{needed >> 20} MiB are needed in {folder}: enlarge it (docker run --shm-size=1g), or free some."
    return Check("shared memory", ok=free >= needed, found=f"{free >> 20} MiB free in {folder}", advice=advice)


def _check_module(name: str, advice: str) -> Check:
    try:
        return Check(name, ok=True, found=metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, ok=False, found="not installed", advice=advice)
