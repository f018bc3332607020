"""Shapes read from configs alone, and configs that are damaged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.model_configs import write_config
from tests.support.tiny_models import TinyModel

from enginehouse_builders.plan.reading import detect_format, read_shape
from enginehouse_builders.spec.model import SourceFormat
from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

_CHECKPOINT: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}


def test_checkpoint_and_engine_have_one_shape(tmp_path: Path) -> None:
    """A TensorRT-LLM checkpoint and the engine made of it read the same, quantization included."""
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    for folder, config in ((checkpoint, _CHECKPOINT), (engine, {"version": "1.2.1", "pretrained_config": _CHECKPOINT})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert detect_format(folder) is SourceFormat.TENSORRT_LLM_CHECKPOINT
    assert read_shape(checkpoint) == read_shape(engine)
    shape = read_shape(checkpoint)
    assert shape.num_kv_heads == 32
    assert shape.stored is not None
    assert (shape.stored.method, shape.stored.matrix_bits) == ("fp8", 8.0)


def test_a_gguf_needs_its_head_only(tmp_path: Path) -> None:
    """A GGUF file cut off after its head reads like the whole file; cut within its head, it is refused by name."""
    path = TinyModel(is_tied=False).write_gguf(tmp_path / "tiny.gguf")
    whole = read_shape(path)
    assert (whole.num_layers, whole.num_heads, whole.num_kv_heads, whole.head_size) == (2, 4, 2, 16)
    assert (whole.vocab_size, whole.is_tied) == (96, False)
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    refused = 0
    for end in range(0, len(data), 97):
        cut.write_bytes(data[:end])
        try:
            assert read_shape(cut) == whole
        except ModelSourceError as error:
            assert "cut.gguf" in str(error)  # noqa: PT017 - either outcome is right, by where it is cut
            refused += 1
    assert refused
    cut.write_bytes(data[: len(data) - 64])
    assert read_shape(cut) == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "does not state num_hidden_layers"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be a whole number of at least 0; it is -3"),
        ({"hidden_size": "big"}, "hidden_size must be a whole number"),
        ({"vocab_size": 0}, "`vocab_size` must be at least 1"),
        ({"num_attention_heads": 0}, "must be at least 1"),
    ],
)
def test_impossible_numbers_are_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """A config without a number, or with one that cannot be, is refused with its name."""
    folder = write_config(tmp_path, "llama-3.1-8b", **change)
    with pytest.raises(ModelSourceError, match=said):
        read_shape(folder)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """Nothing, an empty folder, damaged JSON and a text file are each refused with what to do."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{", encoding="utf-8")
    (tmp_path / "x.txt").write_text("hello", encoding="utf-8")
    for name, said in (
        ("gone", "does not exist"),
        ("empty", "has no config.json"),
        ("bad", "not readable JSON"),
        ("x.txt", "is not a GGUF file"),
    ):
        with pytest.raises(ModelSourceError, match=said):
            read_shape(tmp_path / name)


def test_a_prequantized_folder_says_its_bits(tmp_path: Path) -> None:
    """An AWQ folder of 4 bits in groups of 128 takes 4.25 bits a value: its scales and zero points count."""
    method = {"quant_method": "awq", "bits": 4, "group_size": 128}
    shape = read_shape(write_config(tmp_path, "llama-3.1-8b", quantization_config=method))
    assert shape.stored is not None
    assert shape.stored.matrix_bits == pytest.approx(4.25)
