"""A TensorRT-LLM that does nothing but check: every name, type and choice against the recorded API of 1.2.1.

:func:`install` writes packages `tensorrt_llm`, `torch`, `tensorrt` and a command `trtllm-build` into a folder, for the
`PYTHONPATH` and `PATH` of a generated script. They use this file as their module `strict_tensorrt_llm`, need nothing
else, write files of the right names, and log each call as a line of JSON. What the record does not have is an error.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

API_FILE = Path(__file__).resolve().parents[1] / "data" / "tensorrt_llm_1_2_1.json"
_FOLDER = "STRICT_TENSORRT_LLM"
_SIMPLE: dict[str, tuple[type, ...]] = {
    "int": (int,), "str": (str,), "bool": (bool,), "float": (int, float), "object": (object,), "null": (type(None),),
}  # fmt: skip


class StrictError(TypeError):
    """Something was passed that TensorRT-LLM 1.2.1 does not have, or has with another type."""


def api() -> dict[str, Any]:
    """Return the record."""
    path = Path(os.environ[_FOLDER], "api.json") if _FOLDER in os.environ else API_FILE
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def check_arguments(where: str, parameters: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise :class:`StrictError` for an unknown or missing name, or a value of another type."""
    for name, value in given.items():
        if name not in parameters:
            raise StrictError(f"{where} has no {name!r}")
        if value is None and parameters[name].get("default", "") is None:
            continue
        check_type(f"{where}: {name}", parameters[name]["type"], value)
    for name, parameter in parameters.items():
        if "default" not in parameter and name not in given:
            raise StrictError(f"{where} needs {name!r}")


def check_type(where: str, type_name: str, value: Any) -> None:
    """Raise :class:`StrictError` unless *value* is of one of the types in *type_name*, which are joined by `|`."""
    if not any(_is_of(one, value) for one in type_name.split("|")):
        raise StrictError(f"{where} is {value!r}, not {type_name}")


def _is_of(type_name: str, value: Any) -> bool:
    if type_name.startswith("list["):
        return isinstance(value, list) and all(_is_of(type_name[5:-1], item) for item in value)
    if type_name.startswith("enum:"):
        return value in type_name[5:].split(",")
    if type_name in _SIMPLE:
        is_flag = isinstance(value, bool)
        return isinstance(value, _SIMPLE[type_name]) and (type_name in {"bool", "object"} or not is_flag)
    record = api()
    if type_name == "SpeculativeConfig":
        check_arguments(type_name, record["speculative_configs"][value["decoding_type"]], value)
        return True
    if type_name in record["schemas"]:
        check_arguments(type_name, record["schemas"][type_name], value)
        return True
    return type(value).__name__ == type_name


def log_call(name: str, arguments: dict[str, Any]) -> None:
    """Append one call to the log."""
    with Path(os.environ[_FOLDER], "calls.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"call": name, "arguments": arguments}, default=str) + "\n")


def strict_class(dotted: str) -> type:
    """Return a class whose constructor takes what the record of *dotted* says, and keeps it as attributes."""
    record = api()
    parameters = record["callables"].get(dotted) or record["schemas"][dotted]

    def construct(self: Any, **given: Any) -> None:
        check_arguments(dotted, parameters, given)
        for name, parameter in parameters.items():
            setattr(self, name, given.get(name, parameter.get("default")))
        log_call(dotted, given)

    return type(dotted.rpartition(".")[2], (), {"__init__": construct})


def quant_algo() -> Any:
    """Return the enumeration `QuantAlgo`."""
    names = api()["enums"]["tensorrt_llm.quantization.QuantAlgo"]
    return enum.Enum("QuantAlgo", [(name, name) for name in names], type=str)  # type: ignore[return-value]  # functional form


class AutoModelForCausalLM:
    """Checks a conversion and returns a model that writes empty weights."""

    @staticmethod
    def from_hugging_face(hf_model_or_dir: str, **given: Any) -> Model:
        dotted = "tensorrt_llm.models.AutoModelForCausalLM.from_hugging_face"
        arguments = {"hf_model_or_dir": hf_model_or_dir, **given}
        check_arguments(dotted, api()["callables"][dotted], arguments)
        if not Path(hf_model_or_dir, "config.json").is_file():
            raise StrictError(f"{hf_model_or_dir} has no config.json")
        log_call(dotted, {**arguments, "quant_config": vars(given["quant_config"]), "mapping": vars(given["mapping"])})
        return Model(given["mapping"], given["dtype"])


class Model:
    """A converted model of one rank."""

    def __init__(self, mapping: Any, dtype: str) -> None:
        self._mapping, self._dtype = mapping, dtype

    def save_checkpoint(self, output_dir: str, **given: Any) -> None:
        dotted = "tensorrt_llm.models.PretrainedModel.save_checkpoint"
        check_arguments(dotted, api()["callables"][dotted], {"output_dir": output_dir, **given})
        write_checkpoint(Path(output_dir), [self._mapping.rank], self._mapping.world_size, self._dtype)


def write_checkpoint(folder: Path, ranks: list[int], world_size: int, dtype: str) -> None:
    """Write a checkpoint's files; like the real one it does not make the folder."""
    for rank in ranks:
        (folder / f"rank{rank}.safetensors").write_bytes(b"")
    config = {"architecture": "LlamaForCausalLM", "dtype": dtype, "mapping": {"world_size": world_size}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def quantize_and_export(**given: Any) -> None:
    """Check a quantization, its calibration data too, and write a checkpoint."""
    dotted = "tensorrt_llm.quantization.quantize_and_export"
    check_arguments(dotted, api()["callables"][dotted], given)
    if given["qformat"] not in {"full_prec", "int8_wo", "int4_wo"} or given["kv_cache_dtype"] is not None:
        lines = Path(given["calib_dataset"], "train.jsonl").read_text(encoding="utf-8").splitlines()
        if not lines or any(not isinstance(json.loads(line)["text"], str) for line in lines):
            raise StrictError("the calibration set has no column `text`")
    log_call(dotted, given)
    world_size = given["tp_size"] * given["pp_size"]
    Path(given["output_dir"]).mkdir(parents=True, exist_ok=True)
    write_checkpoint(Path(given["output_dir"]), list(range(world_size)), world_size, given["dtype"])


def trtllm_build(arguments: list[str]) -> None:
    """The command: check flags, values and the checkpoint; write an engine per rank."""
    flags = api()["commands"]["trtllm-build"]["flags"]
    given: dict[str, Any] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name = argument[2:]
            given[name] = []
        else:
            given[name].append(argument)
    for name, values in given.items():
        if name not in flags:
            raise StrictError(f"trtllm-build has no --{name}")
        if flags[name]["type"].startswith("list["):
            continue
        if len(values) != 1:
            raise StrictError(f"--{name} takes one value, given {values}")
        given[name] = int(values[0]) if flags[name]["type"].startswith("int") else values[0]
    check_arguments("trtllm-build", flags, given)
    checkpoint, output = Path(given["checkpoint_dir"]), Path(given["output_dir"])
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    for rank in range(config["mapping"].get("world_size", 1)):
        if not (checkpoint / f"rank{rank}.safetensors").is_file():
            raise StrictError(f"the checkpoint has no rank {rank}")
        (output / f"rank{rank}.engine").write_bytes(b"engine")
    engine_config = {"version": "1.2.1", "pretrained_config": config, "build_config": given}
    (output / "config.json").write_text(json.dumps(engine_config), encoding="utf-8")
    log_call("trtllm-build", given)


_MODULES = {
    "tensorrt_llm/__init__.py": "import os\n__version__ = os.environ.get('STRICT_TENSORRT_LLM_VERSION', '1.2.1')\n",
    "tensorrt_llm/mapping.py": "from strict_tensorrt_llm import strict_class\n"
    "Mapping = strict_class('tensorrt_llm.mapping.Mapping')\n",
    "tensorrt_llm/models/__init__.py": "from strict_tensorrt_llm import AutoModelForCausalLM\n",
    "tensorrt_llm/models/modeling_utils.py": "from strict_tensorrt_llm import strict_class\n"
    "QuantConfig = strict_class('tensorrt_llm.models.modeling_utils.QuantConfig')\n",
    "tensorrt_llm/quantization/__init__.py": "from strict_tensorrt_llm import quant_algo, quantize_and_export\n"
    "QuantAlgo = quant_algo()\n",
    "tensorrt_llm/llmapi/__init__.py": "",
    "tensorrt_llm/llmapi/llm_args.py": "from strict_tensorrt_llm import strict_class\n"
    "TorchLlmArgs = strict_class('tensorrt_llm.llmapi.llm_args.TorchLlmArgs')\n",
    "tensorrt.py": "__version__ = '10.14.1.48'\n",
    "torch.py": """import os, types
version = types.SimpleNamespace(cuda="13.0")
cuda = types.SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: int(os.environ.get("STRICT_NUM_GPUS", "8")),
    get_device_capability=lambda: (9, 0),
)
""",
    "tensorrt_llm-1.2.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.2.1\n",
    "nvidia_modelopt-0.37.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: nvidia-modelopt\nVersion: 0.37.0\n",
}


def install(folder: Path, *, num_gpus: int = 8) -> dict[str, str]:
    """Write the packages and commands into *folder* and return the environment that makes a script find them."""
    for name, text in _MODULES.items():
        path = folder / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copyfile(__file__, folder / "packages" / "strict_tensorrt_llm.py")
    shutil.copyfile(API_FILE, folder / "api.json")
    listing = "".join(f"echo 'GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{index})'\n" for index in range(num_gpus))
    build = (
        f"#!{sys.executable}\nimport sys\nfrom strict_tensorrt_llm import trtllm_build\ntrtllm_build(sys.argv[1:])\n"
    )
    for name, text in (("trtllm-build", build), ("nvidia-smi", f"#!/bin/sh\n{listing}")):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    return {
        **os.environ,
        "PYTHONPATH": str(folder / "packages"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "STRICT_NUM_GPUS": str(num_gpus),
        _FOLDER: str(folder),
    }


def calls(folder: Path) -> list[dict[str, Any]]:
    """Return the logged calls, in order."""
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
