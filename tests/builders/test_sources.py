"""GGUF files and Hugging Face folders: what is read from good ones, and what is said of bad ones."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from tests.support.tiny_models import TinyModel, gguf_name

from enginehouse_builders.cpu.gguf_source import GgufSource
from enginehouse_builders.cpu.graph import build_decoder
from enginehouse_builders.cpu.huggingface_source import HuggingFaceSource
from enginehouse_contract.errors import ModelSourceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = TinyModel(num_layers=1)


def read_fully(source: GgufSource | HuggingFaceSource) -> None:
    """Use everything a build uses."""
    build_decoder(source, "as_in_file")
    source.tokenizer_files()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gguf_weights_are_what_was_written(name: str, kind: str, tmp_path: Path) -> None:
    """Every weight has the written value and order of rows; quantized ones also as blocks."""
    model = TinyModel(name=name, num_layers=1)
    source = GgufSource(model.write_gguf(tmp_path / "tiny.gguf", kind), "0")
    assert source.weight_names() == set(model.weights)
    for weight_name, weight in model.weights.items():
        given = source.weight(weight_name)
        quant_type = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        assert np.array_equal(given, gguf.dequantize(gguf.quantize(weight, quant_type), quant_type))
        stored = source.stored_weight(weight_name)
        if isinstance(stored, str):
            assert stored == quant_type.name.lower()
        else:
            offsets = 0.0 if stored.offsets is None else stored.offsets
            values = (stored.scales * stored.quants + offsets).reshape(weight.shape)
            assert np.allclose(values, given, rtol=1e-6, atol=1e-6)


def test_gguf_states_its_architecture(tmp_path: Path) -> None:
    """Sizes, names and constants come from the metadata; a sliding window bounds the positions."""
    path = MODEL.write_gguf(tmp_path / "tiny.gguf", general__basename="tiny", llama__attention__sliding_window=64)
    source = GgufSource(path, "0")
    arch = source.architecture
    assert (arch.hidden_size, arch.num_kv_heads, arch.head_size, arch.vocab_size) == (64, 2, 16, 96)
    assert (arch.class_name, arch.is_tied, arch.max_position_embeddings) == ("LlamaForCausalLM", True, 64)
    assert arch.rms_norm_eps == pytest.approx(MODEL.eps)
    assert source.name == "tiny"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "gpt-neox"}, "`gpt-neox` model.*known: llama, mistral"),
        ({"llama__rope__scaling__type": "yarn"}, "`yarn`"),
        ({"llama__block_count": None}, "llama.block_count"),
        ({"llama__embedding_length": None}, "llama.embedding_length"),
        ({"llama__attention__head_count": [4, 4]}, "attention.head_count"),
        ({"llama__attention__head_count": 0}, "num_heads.*given 0"),
        ({"llama__attention__head_count_kv": 3}, "num_kv_heads.*given 3"),
        ({"llama__attention__key_length": 15}, "head_size.*given 15"),
        ({"llama__context_length": 0}, "max_position_embeddings.*given 0"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama__block_count": 2}, r"blk\.1\.attn_norm\.weight"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"tokenizer__ggml__pre": "klingon"}, "`klingon`"),
        ({"tokenizer__ggml__model": "bert"}, "`bert`"),
        ({"tokenizer__ggml__tokens": None}, "no tokenizer"),
        ({"tokenizer__ggml__tokens": ["a"]}, "damaged"),
        ({"tokenizer__ggml__merges": ["h q7"]}, "damaged"),
        ({"tokenizer__ggml__merges": ["nospace"]}, "damaged"),
    ],
)
def test_gguf_that_cannot_be_built_is_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What is unknown, missing or inconsistent is refused by name."""
    path = MODEL.write_gguf(tmp_path / "tiny.gguf", **metadata)
    with pytest.raises(ModelSourceError, match=message):
        read_fully(GgufSource(path, "0"))


def test_gguf_types_that_cannot_be_kept_are_named(tmp_path: Path) -> None:
    """`as_in_file` refuses a type it has no blocks for, by name, and says what to do instead."""
    wide = TinyModel(num_layers=1, hidden_size=256, intermediate_size=256, head_size=64)
    source = GgufSource(wide.write_gguf(tmp_path / "wide.gguf", "TQ2_0"), "0")
    with pytest.raises(ModelSourceError, match=r"TQ2_0.*Q4_1.*int8"):
        build_decoder(source, "as_in_file")
    assert build_decoder(source, "int8").get_friendly_name() == "llama_decoder"


def test_gguf_mixtures_of_experts_are_refused(tmp_path: Path) -> None:
    """Tensors that the graph has no use for are named; the model is not computed without them."""
    model = TinyModel(num_layers=1)
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    good = GgufSource(model.write_gguf(tmp_path / "good.gguf"), "0")
    for name in ("context_length", "embedding_length", "feed_forward_length", "block_count"):
        writer.add_uint32(f"llama.{name}", {"embedding_length": 64, "block_count": 1}.get(name, 96))
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.attention.head_count_kv", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name in model.weights:
        writer.add_tensor(gguf_name(name), good.weight(name))
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelSourceError, match=r"variant of `llama`.*blk\.0\.ffn_gate_inp\.weight"):
        build_decoder(GgufSource(path, "0"), "f32")


@pytest.mark.parametrize(
    "content", [b"", b"G", b"GGUF", b"GGML" + bytes(64), b"PK\x03\x04", b'{"model": 1}', bytes(4096)]
)
def test_foreign_files_are_refused(content: bytes, tmp_path: Path) -> None:
    """A file that is not GGUF, or only its beginning, is refused and called what it is."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelSourceError, match=r"is not a GGUF file|damaged or truncated"):
        GgufSource(path, "0")


def test_unreadable_paths_are_refused(tmp_path: Path) -> None:
    """A missing file or a folder in place of a file is refused with the system's reason."""
    with pytest.raises(ModelSourceError, match="cannot be read"):
        GgufSource(tmp_path / "missing.gguf", "0")
    with pytest.raises(ModelSourceError, match=r"config\.json"):
        HuggingFaceSource(tmp_path, "0")


def test_every_truncation_of_a_gguf_is_refused(tmp_path: Path) -> None:
    """Whatever number of bytes is missing at the end, the file is refused."""
    whole = MODEL.write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(4, 6000, 37), len(whole) // 2, len(whole) - 64, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelSourceError, match="damaged or truncated"):
            GgufSource(path, "0")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_ggufs_never_surprise(seed: int, tmp_path: Path) -> None:
    """Random bytes in header and metadata are refused, or do not matter: no other exception, no endless reading."""
    whole = bytearray(MODEL.write_gguf(tmp_path / "whole.gguf", "Q4_1").read_bytes())
    rng = np.random.default_rng(seed)
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(4, 9000, 3):
            damaged[at] = int(rng.integers(256))
        path.write_bytes(damaged)
        try:
            read_fully(GgufSource(path, "0"))
        except ModelSourceError:
            num_refused += 1
    assert num_refused > 0


def test_huge_lengths_in_a_gguf_are_refused_at_once(tmp_path: Path) -> None:
    """Counts and lengths beyond the file's end are refused before anything is allocated."""
    path = tmp_path / "huge.gguf"
    huge = 1 << 62
    field = struct.pack("<Q1sI", 1, b"a", 9)
    for tail in (
        struct.pack("<QQ", 1, huge),
        struct.pack("<QQ", 0, 1) + field + struct.pack("<IQ", 4, huge),
        struct.pack("<QQ", 0, 1) + field + struct.pack("<IQ", 8, huge),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sI", 1, b"a", 8) + struct.pack("<Q", huge),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + tail + bytes(64))
        with pytest.raises(ModelSourceError, match="damaged or truncated"):
            GgufSource(path, "0")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_safetensors_of_every_type_and_shard(dtype: str, tmp_path: Path) -> None:
    """Shards of float32, float16 and bfloat16 give their exact values, and keep their type as in the file."""
    folder = MODEL.write_folder(tmp_path / "tiny", num_shards=3)
    for path in folder.glob("*.safetensors"):
        convert_safetensors(path, dtype)
    source = HuggingFaceSource(folder, "0")
    assert source.weight_names() == set(MODEL.weights)
    for name, weight in MODEL.weights.items():
        assert source.stored_weight(name) == dtype.lower()
        rounded = {
            "F32": weight,
            "F16": weight.astype(np.float16).astype(np.float32),
            "BF16": (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
        }[dtype]
        assert np.array_equal(source.weight(name), rounded)


def convert_safetensors(path: Path, dtype: str) -> None:
    """Rewrite a float32 safetensors file in another type (bfloat16 by cutting)."""
    convert: dict[str, Callable[[Any], Any]] = {
        "F32": lambda values: values,
        "F16": lambda values: values.astype(np.float16),
        "BF16": lambda values: (values.view(np.uint32) >> 16).astype(np.uint16),
    }
    raw = path.read_bytes()
    num_header_bytes = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + num_header_bytes])
    data, body = b"", raw[8 + num_header_bytes :]
    for name, entry in header.items():
        new = convert[dtype](np.frombuffer(body[slice(*entry["data_offsets"])], np.float32)).tobytes()
        header[name] = {**entry, "dtype": dtype, "data_offsets": [len(data), len(data) + len(new)]}
        data += new
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 200, 2000, -1])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_truncated_safetensors_are_refused(num_shards: int, num_bytes: int, tmp_path: Path) -> None:
    """A file or shard cut anywhere is refused, named."""
    folder = MODEL.write_folder(tmp_path / "tiny", num_shards=num_shards)
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelSourceError, match=path.name):
        read_fully(HuggingFaceSource(folder, "0"))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_safetensors_never_surprise(seed: int, tmp_path: Path) -> None:
    """Random bytes in the header are refused, or do not matter."""
    folder = MODEL.write_folder(tmp_path / "tiny")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    rng = np.random.default_rng(seed)
    num_refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(0, 1200, 2):
            damaged[at] = int(rng.integers(256))
        path.write_bytes(damaged)
        try:
            read_fully(HuggingFaceSource(folder, "0"))
        except ModelSourceError:
            num_refused += 1
    assert num_refused > 0


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    """A missing shard, index entry, tokenizer or weights file is named."""
    folder = MODEL.write_folder(tmp_path / "shards", num_shards=2)
    shard = min(folder.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelSourceError, match=shard.name):
        read_fully(HuggingFaceSource(folder, "0"))
    folder = MODEL.write_folder(tmp_path / "tokenizer")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match=r"no tokenizer\.json"):
        read_fully(HuggingFaceSource(folder, "0"))
    folder = MODEL.write_folder(tmp_path / "weights")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelSourceError, match=r"model\.safetensors"):
        read_fully(HuggingFaceSource(folder, "0"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": -64}, "given -64"),
        ({"num_hidden_layers": -1}, "num_layers.*given -1"),
        ({"num_attention_heads": 0}, "given 0"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": float("inf")}, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta.*given -1.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "must be positive"),
        ({"vocab_size": 95}, r"model\.embed_tokens\.weight.*\(96, 64\)"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling.*incomplete"),
        ({"quantization_config": {"quant_method": "gptq"}}, "`gptq`"),
        ({"model_type": "mamba"}, r"not `mamba`.*enginehouse\[export\]"),
        ({"hidden_act": "relu"}, r"`relu`.*enginehouse\[export\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"`yarn`.*enginehouse\[export\]"),
    ],
)
def test_configs_that_cannot_be_built_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Sizes no model can have are refused with field and value, unknown kinds with the extra that knows more."""
    folder = MODEL.write_folder(tmp_path / "tiny", **config)
    with pytest.raises(ModelSourceError, match=message):
        build_decoder(HuggingFaceSource(folder, "0"), "f32")


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, 256),
        ({"model_type": "mistral", "sliding_window": 64}, 64),
        ({"model_type": "mistral", "sliding_window": None}, 256),
        ({"sliding_window": 64, "use_sliding_window": False}, 256),
        ({"sliding_window": 64, "use_sliding_window": True}, 64),
    ],
)
def test_a_sliding_window_bounds_the_positions(config: dict[str, Any], window: int, tmp_path: Path) -> None:
    """Full attention is exact within a sliding window, so the build holds no more; a window not in use is ignored."""
    source = HuggingFaceSource(MODEL.write_folder(tmp_path / "tiny", **config), "0")
    assert source.architecture.max_position_embeddings == window


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_configs_that_are_no_objects_are_refused(content: str, tmp_path: Path) -> None:
    """A `config.json` that is no JSON object is refused by path."""
    folder = MODEL.write_folder(tmp_path / "tiny")
    (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelSourceError, match=r"config\.json"):
        HuggingFaceSource(folder, "0")


def test_the_chat_template_file_is_folded_into_the_config(tmp_path: Path) -> None:
    """A separate `chat_template.jinja` wins over the config's, as in transformers; the tokenizer is kept as it is."""
    folder = MODEL.write_folder(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{{ 'hello' }}", encoding="utf-8")
    files = HuggingFaceSource(folder, "0").tokenizer_files()
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == "{{ 'hello' }}"
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ["", "{", '{"model": {"type": "Unheard"}}'])
def test_tokenizers_that_cannot_be_read_are_refused(content: str, tmp_path: Path) -> None:
    """A damaged `tokenizer.json` is refused when building, not when serving."""
    folder = MODEL.write_folder(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelSourceError, match=r"tokenizer\.json is not a readable tokenizer"):
        HuggingFaceSource(folder, "0").tokenizer_files()
