"""The live model repository: the five models rendered for one build, and the backend directory beside it.

Written into a fresh folder and put in place by rename, so that a server never sees half of it.
"""

from __future__ import annotations

import difflib
import py_compile
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginehouse_contract.errors import ConfigurationError, ServerStartError, refusal
from enginehouse_contract.manifest import verify_build
from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS, MODEL_VERSION, make_config
from enginehouse_contract.render import SHIM_MODULES, shim
from enginehouse_contract.tensors import MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from enginehouse_backends.server.binary import TritonInstallation
    from enginehouse_contract.model_config import ModelConfig

_BACKEND_SHIM: Final = (
    'from enginehouse_backends.triton.engine_model import TritonPythonModel\n\n__all__ = ["TritonPythonModel"]\n'
)
"""The same as ``backends/tensorrtllm/model.py`` of the source tree, for installations without it."""

_BOOTSTRAP: Final = """\
import sys

sys.path[:0] = {paths}
del sys.modules[__name__]
import enginehouse_backends
"""


def render_repository(destination: Path, build_dir: Path, parameters: Mapping[str, str] | None = None) -> None:
    """Write the model repository that serves *build_dir* to *destination*, replacing what was there.

    *parameters* go to every model that has a parameter of that name. Raises :class:`ConfigurationError` for one that no
    model has, :class:`BuildIntegrityError` for a build that is incomplete.
    """
    manifest = verify_build(build_dir, digests=False)
    own = {
        "tokenizer_dir": str(build_dir),
        "gpt_model_path": str(build_dir),
        "build_digest": manifest.build_id,
        **(parameters or {}),
    }
    check_parameters(own)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as scratch:
        fresh = Path(scratch, "repository")
        for model in MODELS:
            known = {*MODELS[model].parameters, *ENGINEHOUSE_PARAMETERS}
            config = make_config(model, {name: value for name, value in own.items() if name in known})
            write_model(fresh / model, model, config)
        if destination.exists():
            destination.rename(Path(scratch, "old"))
        fresh.rename(destination)


def assemble_backends(destination: Path, installation: TritonInstallation, import_paths: Sequence[str]) -> None:
    """Put the Python backend with the stub of this Python, and a `tensorrtllm`, into *destination*: NVIDIA's or ours.

    NVIDIA's is taken where the installation has it: on a GPU host.

    The stub runs a bare interpreter that ignores PYTHONPATH and appends the backend's folder to ``sys.path``. There our
    package's name stands for a few lines that make this environment importable and let the real package in.
    """
    shutil.rmtree(destination, ignore_errors=True)
    python_dir, engine_dir = destination / "python", destination / "tensorrtllm"
    python_dir.mkdir(parents=True)
    nvidias = installation.backend_library.parent.parent / "tensorrtllm"
    if nvidias.is_dir():
        engine_dir.symlink_to(nvidias)
    else:
        engine_dir.mkdir()
    for source in (installation.backend_library, installation.backend_utilities, installation.stub):
        if not source.is_file():
            raise ServerStartError(f"{source} is missing; reinstall {installation.origin}.")
        shutil.copy2(source, python_dir / source.name)
    (python_dir / installation.stub.name).chmod(0o755)
    bootstrap = _BOOTSTRAP.format(paths=list(import_paths))
    (python_dir / "enginehouse_backends.py").write_text(bootstrap, encoding="utf-8")
    if not engine_dir.is_symlink():
        (engine_dir / "enginehouse_backends.py").write_text(bootstrap, encoding="utf-8")
        (engine_dir / "model.py").write_text(_BACKEND_SHIM, encoding="utf-8")


def write_model(folder: Path, model: str, config: ModelConfig) -> None:
    """Write one of the five models, under whatever name its config has, into a new folder."""
    version_dir = folder / str(MODEL_VERSION)
    version_dir.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config.render(), encoding="utf-8")
    if model in SHIM_MODULES:
        source = version_dir / "model.py"
        source.write_text(shim(model), encoding="utf-8")
        # A `__pycache__` that Python writes at first use would count as a change: a later load of an ensemble over this
        # model would load it a second time. Compiled here, without a time to compare, it is never written again.
        py_compile.compile(str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


def check_parameters(parameters: Mapping[str, str]) -> None:
    """Raise :class:`ConfigurationError` for a name that no model has, with the nearest one that there is."""
    known = {*ENGINEHOUSE_PARAMETERS}.union(*(model.parameters for model in MODELS.values()))
    for name in parameters:
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"Did you mean `{nearest[0]}`?" if nearest else ""
            raise ConfigurationError(refusal(name, "is not a parameter of any model", hint=hint))
