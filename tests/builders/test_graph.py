"""The decoder graph against a numpy forward pass, with its state, in batches, and as paged attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import pytest
from openvino._offline_transformations import paged_attention_transformation
from tests.support.tiny_models import TinyModel

from enginehouse_backends.engine.request import SequenceId
from enginehouse_backends.engine.runner import OpenVinoRunner
from enginehouse_backends.engine.step import BlockId, SequenceSlice, StepPlan
from enginehouse_builders.cpu.gguf_source import GgufSource
from enginehouse_builders.cpu.graph import build_decoder
from enginehouse_builders.cpu.huggingface_source import HuggingFaceSource
from enginehouse_contract.errors import ModelSourceError
from enginehouse_contract.manifest import MODEL_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MODELS = {
    "llama": TinyModel(),
    "llama-untied": TinyModel(is_tied=False, seed=1),
    "llama-3.1": TinyModel(llama3_scaling=True, rope_theta=500.0, seed=2),
    "llama-one-kv-head": TinyModel(num_kv_heads=1, seed=3),
    "llama-no-sharing": TinyModel(num_kv_heads=4, seed=4),
    "mistral": TinyModel(name="mistral", seed=5),
    "qwen2": TinyModel(name="qwen2", is_tied=False, rope_theta=1e6, seed=6),
    "qwen3": TinyModel(name="qwen3", head_size=32, seed=7),  # heads wider than hidden / heads
}
IDS = np.random.default_rng(0).integers(0, 96, 40).tolist()


class StatefulDecoder:
    """Runs a decoder the way OpenVINO's own pipelines do."""

    def __init__(self, model: ov.Model) -> None:
        hint = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        self._request = ov.Core().compile_model(model, "CPU", hint).create_infer_request()
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self._request.reset_state()
        self._mask = np.zeros((0, 0), np.int64)

    def run(
        self, ids: list[list[int]], mask: list[list[int]] | None = None, beams: list[int] | None = None
    ) -> NDArray[np.float32]:
        """Append tokens, [batch, length], to the state rows in *beams*; return logits, [batch, length, vocab]."""
        batch = np.array(ids, np.int64)
        new = np.ones_like(batch) if mask is None else np.array(mask, np.int64)
        past = self._mask if self._mask.size else np.zeros((len(batch), 0), np.int64)
        self._mask = np.concatenate([past, new], axis=1)
        positions = np.maximum(self._mask.cumsum(axis=1) - 1, 0)[:, -batch.shape[1] :]
        inputs = {
            "input_ids": batch,
            "attention_mask": self._mask,
            "position_ids": positions,
            "beam_idx": np.array(beams or range(len(batch)), np.int32),
        }
        return np.array(self._request.infer(inputs)["logits"])


def open_source(model: TinyModel, kind: str, tmp_path: Path, **options: Any) -> GgufSource | HuggingFaceSource:
    """Write a model in one of the two forms and open it."""
    if kind == "gguf":
        return GgufSource(model.write_gguf(tmp_path / "tiny.gguf", **options), "0")
    return HuggingFaceSource(model.write_folder(tmp_path / "tiny", **options), "0")


@pytest.mark.parametrize("kind", ["gguf", "huggingface"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_a_plain_forward_pass(name: str, kind: str, tmp_path: Path) -> None:
    """Every architecture, from both kinds of source, gives the logits of the numpy forward pass within 1e-4."""
    model = MODELS[name]
    decoder = StatefulDecoder(build_decoder(open_source(model, kind, tmp_path), "f32"))
    expected = model.logits(IDS)
    whole = decoder.run([IDS])[0]
    decoder.reset()
    pieces = [decoder.run([piece])[0] for piece in (IDS[:17], IDS[17:18], IDS[18:])]
    assert np.abs(whole - expected).max() < 1e-4
    assert np.abs(np.concatenate(pieces) - expected).max() < 1e-4


def test_padding_on_the_left_changes_nothing(tmp_path: Path) -> None:
    """Sequences of different lengths in one padded batch get the logits they get alone, and no row is NaN."""
    model = MODELS["llama"]
    decoder = StatefulDecoder(build_decoder(open_source(model, "gguf", tmp_path), "f32"))
    short, long = IDS[:5], IDS[10:22]
    num_pads = len(long) - len(short)
    first = decoder.run([[0] * num_pads + short, long], [[0] * num_pads + [1] * len(short), [1] * len(long)])
    second = decoder.run([[3], [4]])
    assert np.isfinite(first).all()
    assert np.abs(first[0, num_pads:] - model.logits(short)).max() < 1e-4
    assert np.abs(first[1] - model.logits(long)).max() < 1e-4
    assert np.abs(second[0] - model.logits([*short, 3])[-1:]).max() < 1e-4
    assert np.abs(second[1] - model.logits([*long, 4])[-1:]).max() < 1e-4


def test_beams_reorder_the_state(tmp_path: Path) -> None:
    """`beam_idx` says which row of the state each row of the batch goes on from."""
    model = MODELS["llama"]
    decoder = StatefulDecoder(build_decoder(open_source(model, "gguf", tmp_path), "f32"))
    first, second = IDS[:6], IDS[6:12]
    decoder.run([first, second])
    logits = decoder.run([[1], [1]], beams=[1, 1])
    assert np.abs(logits[:, 0] - model.logits([*second, 1])[-1]).max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_paged_logits_equal_a_plain_forward_pass(name: str, tmp_path: Path) -> None:
    """The engine's runner, over the saved graph, gives the numpy forward pass's logits for two sequences in a step."""
    model = MODELS[name]
    ov.save_model(
        build_decoder(open_source(model, "gguf", tmp_path), "f32"), tmp_path / MODEL_FILE, compress_to_fp16=False
    )
    runner = OpenVinoRunner.load(tmp_path, kv_memory_bytes=1 << 22, kv_precision="f32")
    prompts = [IDS[:35], IDS[5:12]]
    slices = [
        SequenceSlice(SequenceId(0), prompts[0], 0, [BlockId(3), BlockId(0)], len(prompts[0])),
        SequenceSlice(SequenceId(1), prompts[1], 0, [BlockId(1)], len(prompts[1])),
    ]
    step = runner.run(StepPlan(tuple(slices)))
    rows = np.array([step.full_row(row) for row in range(len(prompts[0]) + len(prompts[1]))])
    expected = np.concatenate([model.logits(prompt) for prompt in prompts])
    assert np.abs(rows - expected).max() < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_becomes_paged_attention(name: str, tmp_path: Path) -> None:
    """OpenVINO's transformation replaces every state and leaves nothing of masks or beams."""
    model = MODELS[name]
    decoder = build_decoder(open_source(model, "gguf", tmp_path), "f32")
    paged_attention_transformation(decoder)
    names = {port.get_any_name() for port in decoder.inputs}
    assert names >= {"input_ids", "position_ids", "past_lens", "block_indices"}
    assert not names & {"attention_mask", "beam_idx"}
    assert sum(name.startswith("key_cache.") for name in names) == model.num_layers
    assert not decoder.get_sinks()


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    """A model that lacks a weight is refused with the weight's name."""
    model = TinyModel(num_layers=3)
    for name in [name for name in model.weights if name.startswith("model.layers.2.mlp.up")]:
        del model.weights[name]
    source = open_source(model, "huggingface", tmp_path)
    with pytest.raises(ModelSourceError, match=r"layers\.2\.mlp\.up_proj\.weight"):
        build_decoder(source, "f32")


@pytest.mark.parametrize("kind", ["gguf", "huggingface"])
def test_a_weight_of_another_shape_is_refused(kind: str, tmp_path: Path) -> None:
    """A weight whose shape is not what the configuration says is refused with both shapes."""
    model = TinyModel()
    model.weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((64, 64), np.float32)
    source = open_source(model, kind, tmp_path)
    with pytest.raises(ModelSourceError, match=r"mlp\.up_proj\.weight.*\(64, 64\).*\(96, 64\)"):
        build_decoder(source, "f32")


def test_a_weight_without_use_is_refused(tmp_path: Path) -> None:
    """A model with weights that the graph would leave out is another model, and is refused with their names."""
    model = TinyModel()
    model.weights["model.layers.1.self_attn.sinks.weight"] = np.zeros((64,), np.float32)
    source = open_source(model, "huggingface", tmp_path)
    with pytest.raises(ModelSourceError, match=r"layers\.1\.self_attn\.sinks"):
        build_decoder(source, "f32")
