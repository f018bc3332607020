"""Write what is generated from the contract: ``python -m enginehouse_contract.render ROOT``.

``model_repository/*/config.pbtxt`` with their shims, and ``docs/contract.md``. A test compares the checked-in files
with what :func:`generated_files` returns.
"""

from __future__ import annotations

import sys
from pathlib import Path

from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS, make_config
from enginehouse_contract.support import (
    GPU_ONLY_PARAMETERS,
    INERT_INPUTS,
    REFUSED_INPUTS,
    REFUSED_PARAMETERS,
    REFUSED_PREPROCESSING_INPUTS,
)
from enginehouse_contract.tensors import ENSEMBLE, MODELS, RENAMED_INPUTS, TENSORRT_LLM, ModelContract, Tensor

SHIM_MODULES = {
    "preprocessing": "preprocessing",
    "postprocessing": "postprocessing",
    "tensorrt_llm_bls": "bls_model",
}
"""Model -> module of `enginehouse_backends.triton` that serves it; the engine's is found as a backend instead."""


def shim(model: str) -> str:
    """Return a model's ``1/model.py``: Triton loads it by path, the code lives in the installed package."""
    module = SHIM_MODULES[model]
    return f'from enginehouse_backends.triton.{module} import TritonPythonModel\n\n__all__ = ["TritonPythonModel"]\n'


def generated_files() -> dict[str, str]:
    """Return the text of every generated file by its path below the root of the repository."""
    files = {"docs/contract.md": render_docs()}
    for model in MODELS:
        folder = f"model_repository/{model}"
        files[f"{folder}/config.pbtxt"] = make_config(model).render()
        if model in SHIM_MODULES:
            files[f"{folder}/1/model.py"] = shim(model)
        else:
            files[f"{folder}/1/.gitkeep"] = ""
    return files


def render_docs() -> str:
    """Return ``docs/contract.md``."""
    lines = [
        "# The tensor contract",
        "",
        "Generated from `enginehouse_contract` (`python -m enginehouse_contract.render .`); do not edit.",
        "",
        "Names, types and shapes are those of NVIDIA's `inflight_batcher_llm` models (tensorrtllm_backend v0.19.0)",
        "with the additions of TensorRT-LLM up to 1.2.1. Clients send shapes with a leading batch dimension.",
        "*optional*: may be left out. *scalar*: the backend sees it without the last dimension.",
        "*ragged*: lengths may differ within a batch.",
        "",
        "Two inputs have two names; either may be sent, both only with one value: "
        + ", ".join(f"`{old}` = `{new}`" for old, new in RENAMED_INPUTS.items())
        + ".",
        "",
    ]
    for model in MODELS.values():
        lines += _render_model(model)
    lines += ["## Parameters of the engine model on a CPU host", "", "| parameter | what happens |", "|---|---|"]
    for name in TENSORRT_LLM.parameters:
        if name in REFUSED_PARAMETERS:
            fate = f"refused when set: {REFUSED_PARAMETERS[name]}"
        else:
            fate = f"for GPU hosts, not read: {GPU_ONLY_PARAMETERS[name]}" if name in GPU_ONLY_PARAMETERS else "read"
        lines.append(f"| `{name}` | {fate} |")
    lines += ["", "Of our own:", "", "| parameter | what it is for |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in sorted(ENGINEHOUSE_PARAMETERS.items())]
    return "\n".join(lines) + "\n"


def _render_model(model: ModelContract) -> list[str]:
    lines = [f"## `{model.name}`", "", "| input | type | dims | | on a CPU host |", "|---|---|---|---|---|"]
    lines += [
        f"| `{tensor.name}` | {tensor.data_type} | {_dims(tensor)} | {_flags(tensor)} | {_fate(model, tensor)} |"
        for tensor in model.inputs
    ]
    lines += ["", "| output | type | dims |", "|---|---|---|"]
    lines += [f"| `{tensor.name}` | {tensor.data_type} | {_dims(tensor)} |" for tensor in model.outputs]
    return [*lines, ""]


def _dims(tensor: Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.dims)) + "]"


def _flags(tensor: Tensor) -> str:
    flags = (("optional", tensor.optional), ("scalar", tensor.reshaped), ("ragged", tensor.ragged))
    return ", ".join(name for name, is_set in flags if is_set)


def _fate(model: ModelContract, tensor: Tensor) -> str:
    """What the CPU host does with an input; the ensemble hands its inputs on, so the steps decide."""
    name = tensor.name
    if model.name == ENSEMBLE.name:
        return next((f"as `{step.model}`" for step in model.steps if name in step.inputs.values()), "")
    refused = {**REFUSED_INPUTS, **REFUSED_PREPROCESSING_INPUTS}
    if name in refused:
        return f"refused: {refused[name]}"
    return f"no effect: {INERT_INPUTS[name]}" if name in INERT_INPUTS else "honoured"


def main(root: str) -> None:
    """Write every generated file below *root*."""
    for name, text in generated_files().items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
