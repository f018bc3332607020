"""What a GPU target must know of a model before its weights are read: everything here comes from JSON files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.cpu.safetensors_file import SafetensorsFile
from enginehouse_builders.spec.model import SourceFormat
from enginehouse_contract.errors import ModelSourceError, refusal
from enginehouse_contract.manifest import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FILES: Final = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
"""Files that travel with a build beside its weights; the first two must be there."""

_INDEX_FILE: Final = "model.safetensors.index.json"
_MODELOPT_FILE: Final = "hf_quant_config.json"
_DTYPES: Final = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float16"}  # as TensorRT-LLM's `auto` does
_STORED: Final = {
    "awq": "int4_awq",
    "gptq": "int4_gptq",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "FP8": "fp8",
    "NVFP4": "nvfp4",
    "W4A16_AWQ": "int4_awq",
    "W4A16_GPTQ": "int4_gptq",
    "W8A16": "int8",
    "W4A16": "int4",
    "W8A8_SQ_PER_CHANNEL": "int8_smoothquant",
}


@dataclass(frozen=True, slots=True)
class Source:
    """A Hugging Face folder or a TensorRT-LLM checkpoint, as its JSON files describe it."""

    path: Path
    format: SourceFormat
    architecture: str
    dtype: str  # float16 or bfloat16; what `auto` means for this model
    window: int  # tokens of prompt and answer that the model was trained for
    stored: str | None  # how the weights are quantized already, by the spec's names
    stored_by: str  # who wrote them: "", "autoawq", "gptq", "modelopt", or the method's own name
    group_size: int | None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1


def read_source(path: Path) -> Source:
    """Read the JSON files of the model in *path*.

    Raises :class:`ModelSourceError` for a folder that is neither kind, lacks a file, has truncated weights, or has a
    quantization that neither this project nor TensorRT-LLM knows.
    """
    if not path.is_dir():
        raise ModelSourceError(f"{path} is no folder; TensorRT-LLM reads Hugging Face folders and its own checkpoints.")
    config = read_json(path / CONFIG_FILE)
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        if not (path / name).is_file():
            raise ModelSourceError(f"{path} has no {name}; put the one of the model's Hugging Face folder there.")
    check_weights(path)
    try:
        return _checkpoint(path, config) if "architecture" in config else _hugging_face(path, config)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelSourceError(f"{path / CONFIG_FILE} does not describe a language model ({error!r}).") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in *path*; raise :class:`ModelSourceError` when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} holds no JSON object.")
    return value


def check_weights(path: Path) -> None:
    """Look at the weights' files, not into them: hours later TensorRT-LLM would find the same.

    Raises :class:`ModelSourceError` when there are none, when the index names one that is missing, or when a file of
    safetensors is truncated.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files and not any(path.glob("pytorch_model*.bin")):
        raise ModelSourceError(f"{path} has no weights: no *.safetensors and no pytorch_model*.bin.")
    index = path / _INDEX_FILE
    named = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else set()
    if missing := sorted(named - {file.name for file in files}):
        raise ModelSourceError(f"{path} lacks {', '.join(missing)}, which {_INDEX_FILE} names.")
    for file in files:
        SafetensorsFile(file)


def _hugging_face(path: Path, config: dict[str, Any]) -> Source:
    given = config.get("dtype") or config.get("torch_dtype") or "float16"
    method, group_size, by = None, None, ""
    if quantization := config.get("quantization_config"):
        method, group_size = quantization["quant_method"], quantization.get("group_size")
        by = {"awq": "autoawq"}.get(method, method)
        if method == "modelopt":
            method = quantization.get("quant_algo") or quantization["quantization"]["quant_algo"]
        if quantization.get("desc_act"):
            problem = "has activation order (desc_act), which TensorRT-LLM does not read"
            raise ModelSourceError(refusal("model.source", problem, given=str(path)))
    elif (path / _MODELOPT_FILE).is_file():
        stored = read_json(path / _MODELOPT_FILE)["quantization"]
        method, group_size, by = stored["quant_algo"], stored.get("group_size"), "modelopt"
    return Source(
        path=path,
        format=SourceFormat.HUGGING_FACE,
        architecture=str(config["architectures"][0]),
        dtype=_dtype(given),
        window=int(config["max_position_embeddings"]),
        stored=_stored(method),
        stored_by=by,
        group_size=group_size,
    )


def _checkpoint(path: Path, config: dict[str, Any]) -> Source:
    quantization, mapping = config.get("quantization", {}), config.get("mapping", {})
    return Source(
        path=path,
        format=SourceFormat.TENSORRT_LLM_CHECKPOINT,
        architecture=str(config["architecture"]),
        dtype=_dtype(config["dtype"]),
        window=int(config["max_position_embeddings"]),
        stored=_stored(quantization.get("quant_algo")),
        stored_by="tensorrt_llm",
        group_size=quantization.get("group_size"),
        tensor_parallel=int(mapping.get("tp_size", 1)),
        pipeline_parallel=int(mapping.get("pp_size", 1)),
    )


def _dtype(given: str) -> str:
    return _DTYPES[given.removeprefix("torch.")]


def _stored(method: str | None) -> str | None:
    if method is None:
        return None
    if method not in _STORED:
        problem = "is quantized in a way that no GPU target here takes"
        raise ModelSourceError(refusal("model.source", problem, limit=", ".join(sorted(_STORED)), given=method))
    return _STORED[method]
