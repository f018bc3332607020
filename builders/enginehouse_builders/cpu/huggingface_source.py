"""A Hugging Face folder as a model source: safetensors read without torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from enginehouse_builders.cpu.architecture import ARCHITECTURES, Architecture, RopeScaling
from enginehouse_contract.errors import ModelSourceError
from enginehouse_contract.manifest import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from enginehouse_builders.cpu.source import QuantizedMatrix

_INDEX_FILE: Final = "model.safetensors.index.json"
_FLOAT_TYPES: Final[dict[str, type[Any]]] = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"


class HuggingFaceSource:
    """Reads config, safetensors and tokenizer files; raises :class:`ModelSourceError` for what it cannot use."""

    kind = "huggingface"

    def __init__(self, folder: Path, sha256: str) -> None:
        self.folder = folder
        self.sha256 = sha256
        self.name = folder.name
        self._config = _read_json(folder / "config.json")
        self._files = self._locate_weights()
        self.architecture = self._read_architecture()
        self.why_not_by_hand = self._why_not_by_hand()

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return one weight in float32; bfloat16 is widened exactly."""
        path = self._files.get(name)
        if path is None:
            raise ModelSourceError(f"{self.folder} has no weight {name}; the checkpoint is incomplete.")
        return _read_tensor(path, name)

    def quantized_weight(self, name: str) -> QuantizedMatrix | None:  # noqa: ARG002 - the protocol's signature
        """Return None: a checkpoint of this form is not quantized in blocks."""
        return None

    def has_weight(self, name: str) -> bool:
        """Return whether the checkpoint has a weight of this name."""
        return name in self._files

    def tokenizer_files(self) -> dict[str, str]:
        """Return the folder's own tokenizer files, with the chat template folded into the config."""
        path = self.folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelSourceError(f"{self.folder} has no {TOKENIZER_FILE}; save the tokenizer in its fast form there.")
        config_path = self.folder / TOKENIZER_CONFIG_FILE
        config = _read_json(config_path) if config_path.is_file() else {}
        template_path = self.folder / _CHAT_TEMPLATE_FILE
        if template_path.is_file():
            config["chat_template"] = template_path.read_text(encoding="utf-8")
        return {
            TOKENIZER_FILE: path.read_text(encoding="utf-8"),
            TOKENIZER_CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False),
        }

    def _locate_weights(self) -> dict[str, Path]:
        index = self.folder / _INDEX_FILE
        if index.is_file():
            weight_map: dict[str, str] = _read_json(index).get("weight_map", {})
            files = {name: self.folder / file for name, file in weight_map.items()}
        else:
            path = self.folder / "model.safetensors"
            files = dict.fromkeys(_tensor_names(path), path)
        for path in set(files.values()):
            if not path.is_file():
                raise ModelSourceError(f"{self.folder}: {path.name} is missing; the checkpoint is incomplete.")
        return files

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelSourceError(f"{self.folder}: config.json does not state {name}; it cannot be built from.")
        return value

    def _read_architecture(self) -> Architecture:
        name = str(self._config.get("model_type", ""))
        num_heads, hidden_size = int(self._number("num_attention_heads")), int(self._number("hidden_size"))
        is_tied = bool(self._config.get("tie_word_embeddings", name == "qwen2"))
        return Architecture(
            name=name,
            vocab_size=int(self._number("vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(self._number("intermediate_size")),
            num_layers=int(self._number("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=int(self._number("num_key_value_heads", num_heads)),
            head_size=int(self._number("head_dim", hidden_size // num_heads)),
            max_position_embeddings=int(self._number("max_position_embeddings")),
            rms_norm_eps=float(self._number("rms_norm_eps")),
            rope_theta=float(self._rope_parameter("rope_theta", 10000.0)),
            is_tied=is_tied or "lm_head.weight" not in self._files,
            rope_scaling=self._rope_scaling(),
            has_qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._files,
            has_qk_norm="model.layers.0.self_attn.q_norm.weight" in self._files,
        )

    def _rope_parameter(self, name: str, default: float) -> float:
        """Newer checkpoints keep rotary parameters in ``rope_parameters``."""
        nested = self._config.get("rope_parameters") or {}
        return float(self._config.get(name) or nested.get(name) or default)

    def _why_not_by_hand(self) -> str | None:
        name, kind = self._config.get("model_type"), self._rope_kind()
        if name not in ARCHITECTURES:
            return f"the hand-built graph knows {', '.join(ARCHITECTURES)}, not `{name}`"
        if kind not in {"default", "llama3"}:
            return f"the hand-built graph does not know the rotary scaling `{kind}`"
        return None

    def _rope_kind(self) -> str:
        raw: dict[str, Any] = self._config.get("rope_scaling") or self._config.get("rope_parameters") or {}
        return str(raw.get("rope_type", raw.get("type", "default")))

    def _rope_scaling(self) -> RopeScaling | None:
        if self._rope_kind() != "llama3":
            return None
        raw: dict[str, Any] = self._config.get("rope_scaling") or self._config.get("rope_parameters") or {}
        try:
            return RopeScaling(
                factor=float(raw["factor"]),
                low_freq_factor=float(raw["low_freq_factor"]),
                high_freq_factor=float(raw["high_freq_factor"]),
                original_max_position_embeddings=int(raw["original_max_position_embeddings"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelSourceError(f"{self.folder}: config.json's rotary scaling is incomplete ({error}).") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} must hold a JSON object.")
    return value


def _tensor_names(path: Path) -> list[str]:
    if not path.is_file():
        msg = f"{path.parent} has neither {path.name} nor {_INDEX_FILE}; save the checkpoint as safetensors."
        raise ModelSourceError(msg)
    try:
        with safe_open(path, framework="numpy") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise ModelSourceError(f"{path} is damaged or truncated ({error}).") from error


def _read_tensor(path: Path, name: str) -> NDArray[np.float32]:
    """Read one tensor by the format's own header: numpy has no bfloat16, whose bits are float32's upper half."""
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        start = stream.tell()
        entry = header[name]
        begin, end = entry["data_offsets"]
        stream.seek(start + begin)
        raw = stream.read(end - begin)
    kind, shape = entry["dtype"], entry["shape"]
    if kind == "BF16":
        wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if kind in _FLOAT_TYPES:
        return np.frombuffer(raw, _FLOAT_TYPES[kind]).reshape(shape).astype(np.float32)
    raise ModelSourceError(f"{path}: {name} has the type {kind}; known: BF16, F16, F32.")
