"""A Hugging Face folder as a model source: safetensors read without torch."""

from __future__ import annotations

import json
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer

from enginehouse_builders.cpu.architecture import ARCHITECTURES, Architecture
from enginehouse_builders.cpu.export import exported_architecture
from enginehouse_builders.cpu.safetensors_file import SafetensorsFile
from enginehouse_contract.errors import ModelSourceError
from enginehouse_contract.manifest import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from enginehouse_builders.cpu.source import FloatType, QuantizedMatrix

_CONFIG_FILE: Final = "config.json"
_WEIGHTS_FILE: Final = "model.safetensors"
_INDEX_FILE: Final = "model.safetensors.index.json"
_CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
_ACTIVATIONS: Final = ("silu", "swish")
_ROPE_TYPES: Final = ("default", "linear", "llama3")
_UNUSED_SUFFIX: Final = ".rotary_emb.inv_freq"


class HuggingFaceSource:
    """Reads config, safetensors and tokenizer files; raises :class:`ModelSourceError` for what it cannot use."""

    kind = "huggingface"

    def __init__(self, folder: Path, sha256: str) -> None:
        self.sha256 = sha256
        self.name = folder.resolve().name
        self._folder = folder
        self._config = _read_json(folder / _CONFIG_FILE)
        rope = self._config.get("rope_scaling") or self._config.get("rope_parameters") or {}
        self._rope: dict[str, Any] = rope if isinstance(rope, dict) else {}
        self._rope_type = str(self._rope.get("rope_type", self._rope.get("type", "default")))
        if method := (self._config.get("quantization_config") or {}).get("quant_method"):
            msg = f"{folder} is quantized by `{method}`, which cannot be read; use the checkpoint it was made from."
            raise ModelSourceError(msg)
        self.why_not_by_hand = self._why_not_by_hand()

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture, from ``config.json``."""
        if self.why_not_by_hand is not None:
            return exported_architecture(self._folder, self.why_not_by_hand)
        num_heads, hidden_size = int(self._number("num_attention_heads")), int(self._number("hidden_size"))
        head_size = int(self._number("head_dim", hidden_size // max(num_heads, 1)))
        is_tied = self._config.get("tie_word_embeddings", "lm_head.weight" not in self._files)
        return Architecture(
            name=str(self._config["model_type"]),
            vocab_size=int(self._number("vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(self._number("intermediate_size")),
            num_layers=int(self._number("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=int(self._number("num_key_value_heads", num_heads)),
            head_size=head_size,
            max_position_embeddings=self._window(),
            rms_norm_eps=self._number("rms_norm_eps"),
            rope_theta=self._number("rope_theta", self._rope.get("rope_theta", 10000.0)),
            is_tied=bool(is_tied),
            rope_divisors=self._rope_divisors(head_size),
        )

    def weight_names(self) -> set[str]:
        """Return the names of all weights, but for tables of frequencies that old checkpoints carry."""
        return {name for name in self._files if not name.endswith(_UNUSED_SUFFIX)}

    def weight(self, name: str) -> NDArray[np.float32]:
        """Return one weight in float32."""
        return self._file_of(name).values(name)

    def stored_weight(self, name: str) -> QuantizedMatrix | FloatType:
        """Return the type of a weight's numbers."""
        return self._file_of(name).float_type(name)

    def tokenizer_files(self) -> dict[str, str]:
        """Return the folder's own tokenizer files, with the chat template folded into the config."""
        path = self._folder / TOKENIZER_FILE
        if not path.is_file():
            raise ModelSourceError(
                f"{self._folder} has no {TOKENIZER_FILE}; save the tokenizer there in its fast form."
            )
        config_path = self._folder / TOKENIZER_CONFIG_FILE
        config = _read_json(config_path) if config_path.is_file() else {}
        template_path = self._folder / _CHAT_TEMPLATE_FILE
        if template_path.is_file():
            config["chat_template"] = _read_text(template_path)
        text = _read_text(path)
        try:
            Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ModelSourceError(f"{path} is not a readable tokenizer ({error}).") from error
        return {
            TOKENIZER_FILE: text,
            TOKENIZER_CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
        }

    @cached_property
    def _files(self) -> dict[str, SafetensorsFile]:
        """The file of each weight."""
        index = self._folder / _INDEX_FILE
        if not index.is_file():
            path = self._folder / _WEIGHTS_FILE
            if not path.is_file():
                msg = f"{self._folder} has neither {_WEIGHTS_FILE} nor {_INDEX_FILE}; save it as safetensors."
                raise ModelSourceError(msg)
            file = SafetensorsFile(path)
            return dict.fromkeys(file.names, file)
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelSourceError(f"{index} has no `weight_map`; the checkpoint is damaged.")
        shards = {shard: SafetensorsFile(self._folder / shard) for shard in sorted(set(weight_map.values()))}
        return {name: shards[shard] for name, shard in weight_map.items()}

    def _file_of(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None or name not in file.names:
            raise ModelSourceError(f"{self._folder} has no weight {name}; the checkpoint is incomplete.")
        return file

    def _number(self, name: str, default: object = None) -> float:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ModelSourceError(f"{self._folder}: {_CONFIG_FILE} does not state {name}; it cannot be built from.")
        return value

    def _window(self) -> int:
        """Positions that full attention serves exactly: all, or those of a sliding window that is in use."""
        window = int(self._number("max_position_embeddings"))
        sliding = self._config.get("sliding_window")
        uses_sliding = self._config.get("use_sliding_window", self._config["model_type"] == "mistral")
        return min(window, int(sliding)) if sliding and uses_sliding else window

    def _why_not_by_hand(self) -> str | None:
        name = self._config.get("model_type")
        if name not in ARCHITECTURES:
            return f"the hand-built graph knows {', '.join(ARCHITECTURES)}, not `{name}`"
        if (activation := self._config.get("hidden_act", "silu")) not in _ACTIVATIONS:
            return f"the hand-built graph does not know the activation `{activation}`"
        if self._rope_type not in _ROPE_TYPES:
            return f"the hand-built graph does not know the rotary scaling `{self._rope_type}`"
        if (share := self._config.get("partial_rotary_factor") or 1.0) != 1.0:
            return f"the hand-built graph rotates whole heads, not {share} of them"
        return None

    def _rope_divisors(self, head_size: int) -> tuple[float, ...] | None:
        if self._rope_type == "default":
            return None
        try:
            if self._rope_type == "linear":
                return (float(self._rope["factor"]),) * (head_size // 2)
            return llama3_rope_divisors(
                head_size,
                self._number("rope_theta", self._rope.get("rope_theta", 10000.0)),
                factor=float(self._rope["factor"]),
                low_freq_factor=float(self._rope["low_freq_factor"]),
                high_freq_factor=float(self._rope["high_freq_factor"]),
                original_window=int(self._rope["original_max_position_embeddings"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{self._folder}: the rotary scaling in {_CONFIG_FILE} is incomplete ({error})."
            raise ModelSourceError(msg) from error


def llama3_rope_divisors(
    head_size: int,
    rope_theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_window: int,
) -> tuple[float, ...]:
    """Return what Llama 3.1 divides each rotation frequency by, [head size / 2].

    Wavelengths beyond the original window are stretched by *factor*, short ones are kept, and those between are blended
    (transformers, ``_compute_llama3_parameters``).
    """
    divisors = []
    for index in range(head_size // 2):
        num_turns = original_window / (2 * math.pi * rope_theta ** (2 * index / head_size))
        kept = (num_turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(divisors)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError(f"{path} cannot be read as text ({error}).") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelSourceError(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} must hold a JSON object.")
    return value
