"""Writing a GPU target's folder, and running its script where that can be done.

:func:`emit` works on any host: it reads the model's JSON files and digests, and needs no GPU and no TensorRT-LLM.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.digests import source_digest
from enginehouse_builders.targets.calibration import calibration_samples
from enginehouse_builders.targets.emitted import CONTAINER_IMAGE, SCRIPT_FILE, EmittedTarget
from enginehouse_builders.targets.engine_plan import plan_engine
from enginehouse_builders.targets.host import missing_on_this_host
from enginehouse_builders.targets.llm_api_plan import plan_llm_api
from enginehouse_builders.targets.readme import render_readme
from enginehouse_builders.targets.script import render_script
from enginehouse_builders.targets.source import TOKENIZER_FILES, read_source
from enginehouse_contract.errors import BuildError, ConfigurationError, refusal
from enginehouse_contract.manifest import verify_build
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from enginehouse_builders.spec.model import Spec
    from enginehouse_builders.targets.emitted import TargetPlan
    from enginehouse_contract.manifest import Target

LOG_FILE: Final = "build.log"
_PLANNERS: Final = {"tensorrt_llm": plan_engine, "tensorrt_llm_pytorch": plan_llm_api}
_LOG_TAIL_LINES: Final = 15
_CONTAINER_OUT: Final = "/target"


def emit(spec: Spec, target: Target, out_dir: Path) -> EmittedTarget:
    """Write the folder that builds *target* of *spec*: script, README, calibration samples, serving parameters.

    Paths in *spec* are absolute, or relative to the working directory. The same spec and files give the same bytes.
    Raises :class:`ConfigurationError` for what the target refuses, :class:`ModelSourceError` for a model that cannot be
    read, :class:`BuildError` when the folder is not empty or cannot be written.
    """
    plan = _plan(spec, target)
    files = _files(spec, plan)
    try:
        if out_dir.exists() and any(out_dir.iterdir()):
            raise BuildError(f"{out_dir} is not empty; give a folder that does not exist yet.")
        for name, text in files.items():
            path = out_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        (out_dir / SCRIPT_FILE).chmod(0o755)
    except OSError as error:
        raise BuildError(f"{out_dir} cannot be written ({error.strerror or error}).") from error
    arguments = [part for option, folder in plan.folders.items() for part in (option, str(folder.absolute()))]
    return EmittedTarget(
        target=target,
        folder=out_dir,
        files=tuple(files),
        script_arguments=tuple(arguments),
        container_image=CONTAINER_IMAGE,
        container_command=container_command(plan, out_dir),
        serving_parameters=plan.serving,
    )


def build(spec: Spec, target: Target, work_dir: Path) -> dict[str, str]:
    """Write the folder into *work_dir* and run its script; return where the build, its log and its script are.

    Raises :class:`BuildError` saying what this host lacks and where the script is, or how the script failed.
    """
    emitted = emit(spec, target, work_dir)
    if missing := missing_on_this_host(spec, target):
        lacks = "\n".join(f"  - {one}" for one in missing)
        raise BuildError(
            f"`{target}` cannot be built on this host; missing:\n{lacks}\n"
            f"The script is {emitted.script}; in the pinned container it runs as\n  {emitted.container_command}"
        )
    log = work_dir / LOG_FILE
    command = [sys.executable, str(emitted.script.absolute()), *emitted.script_arguments]
    with log.open("wb") as stream:
        code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode  # noqa: S603 - our own script
    if code != 0:
        tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:])
        again = shlex.join(command)
        raise BuildError(f"the build script ended with {code}:\n{tail}\nThe log is {log}; run it again by\n  {again}")
    manifest = verify_build(emitted.engine_dir, digests=False)
    return {
        "build_id": manifest.build_id,
        "engine_dir": str(emitted.engine_dir),
        "log": str(log),
        "script": str(emitted.script),
    }


def container_command(plan: TargetPlan, out_dir: Path) -> str:
    """Return the shell command that runs the script in the pinned container."""
    mounts, arguments = [], []
    for option, folder in plan.folders.items():
        inside = f"/inputs/{option.removeprefix('--')}"
        mounts += ["-v", f"{folder.absolute()}:{inside}:ro"]
        arguments += [option, inside]
    head = ["docker", "run", "--rm", "--gpus", "all", "--ipc", "host", "--ulimit", "memlock=-1"]
    mounts += ["-v", f"{out_dir.absolute()}:{_CONTAINER_OUT}"]
    run = [CONTAINER_IMAGE, "python3", f"{_CONTAINER_OUT}/{SCRIPT_FILE}", *arguments]
    return shlex.join([*head, *mounts, *run])


def _plan(spec: Spec, target: Target) -> TargetPlan:
    if target not in _PLANNERS:
        problem = "is not a GPU target"
        raise ConfigurationError(refusal("targets", problem, limit=", ".join(_PLANNERS), given=target))
    return _PLANNERS[target](spec, read_source(Path(spec.model.source)))


def _files(spec: Spec, plan: TargetPlan) -> dict[str, str]:
    """Every file of the folder by its path."""
    files = {SCRIPT_FILE: render_script(plan, _record(spec, plan)), "README.md": render_readme(spec, plan)}
    if plan.needs_calibration:
        lines = [json.dumps({"text": sample}, ensure_ascii=False) for sample in calibration_samples(spec)]
        files["calibration/train.jsonl"] = "\n".join(lines) + "\n"
    files |= {f"build/{name}": text for name, text in plan.files.items()}
    return files


def _record(spec: Spec, plan: TargetPlan) -> dict[str, Any]:
    """What the manifest repeats: names and digests, no path of this host."""
    cache = load_settings().store_dir / ".source-digests.json"
    source = Path(spec.model.source)
    inputs = {option.removeprefix("--"): source_digest(folder, cache) for option, folder in plan.folders.items()}
    return {
        "target": plan.target,
        "model_name": spec.name,
        "source": {"kind": read_source(source).format.value, "name": source.name, "sha256": inputs.pop("model")},
        "inputs_sha256": inputs,
        "weight_precision": plan.weight_precision,
        "kv_precision": plan.kv_precision,
        "limits": dataclasses.asdict(plan.limits),
        "calibration_sha256": _digest(calibration_samples(spec)) if plan.needs_calibration else None,
        "generated_sha256": _digest(f"{name}\n{text}" for name, text in sorted(plan.files.items())),
        "tokenizer_files": list(TOKENIZER_FILES),
        "packages": list(plan.packages),
    }


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
