"""Small model folders without weights, and a strict TensorRT-LLM beside them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import strict_tensorrt_llm

from enginehouse_builders.spec.model import Spec

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "vocab_size": 96,
}


EMPTY_SAFETENSORS = (2).to_bytes(8, "little") + b"{}"


class Models:
    """Makes folders that look like models to whoever does not read weights."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def hugging_face(self, name: str = "model", **config: Any) -> Path:
        """A Hugging Face folder; *config* adds to its config.json."""
        folder = self._folder(name, {**CONFIG, **config})
        (folder / "model.safetensors").write_bytes(EMPTY_SAFETENSORS)
        return folder

    def checkpoint(self, name: str = "checkpoint", world_size: int = 1, **config: Any) -> Path:
        """A TensorRT-LLM checkpoint of so many tensor-parallel ranks."""
        mapping = {"world_size": world_size, "tp_size": world_size, "pp_size": 1}
        settings = {"architecture": "LlamaForCausalLM", "dtype": "float16", "max_position_embeddings": 2048}
        folder = self._folder(name, {**settings, "mapping": mapping, **config})
        for rank in range(world_size):
            (folder / f"rank{rank}.safetensors").write_bytes(EMPTY_SAFETENSORS)
        return folder

    def medusa(self, heads: int = 3) -> Path:
        """A folder of Medusa heads."""
        return self._folder("medusa", {"medusa_num_heads": heads, "medusa_num_layers": 1})

    def _folder(self, name: str, config: dict[str, Any]) -> Path:
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
        tokenizer = {"chat_template": "{{ messages[0].content }}"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        return folder


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    """A maker of model folders; digests are remembered in this test's own home."""
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "home"))
    root = tmp_path / "models"
    root.mkdir()
    return Models(root)


@pytest.fixture
def strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a strict TensorRT-LLM 1.2.1 with 8 GPUs, found by scripts that this test runs."""
    folder = tmp_path / "strict"
    for name, value in strict_tensorrt_llm.install(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(folder / "packages"))
    return folder


def make_spec(source: Path, **fields: Any) -> Spec:
    """A spec for the model in *source*."""
    return Spec.model_validate({"name": "tiny", "model": {"source": str(source)}, **fields})
