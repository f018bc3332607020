"""Tokenizers written from GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_tokenizers import write_byte_level, write_sentencepiece
from tokenizers import Tokenizer

from enginehouse_builders.cpu.gguf_source import GgufSource
from enginehouse_builders.cpu.gguf_tokenizer import tokenizer_files_of
from enginehouse_contract.errors import ModelSourceError

REFERENCE = Path(__file__).parents[1] / "data" / "reference_greedy.json"
TEXTS = [
    "Hello, world! It's 2026; don't you'll WE'RE",
    "naïve café Äpfel e\u0301 ǅ ﬁ",
    "你好世界。こんにちは 안녕하세요 привет мир",
    "🎉🎉 party 👩‍👩‍👧 family 🏳️‍🌈",
    "def f(x):\n\treturn {\n        'a': x**2,  # twice\n    }\r\n\r\n",
    "   leading, trailing   \n\n\n\t\t mixed \u00a0\u3000 spaces  ",
    "1234567890 3.14159 0x7f ½ ٣",
    "\x00\x01\x7f",
    "a",
    " ",
]
TYPES = {"normal": 1, "unknown": 2, "control": 3, "user_defined": 4, "byte": 6}


def metadata_of(folder: Path, model: str, pre: str = "gpt-2") -> dict[str, Any]:
    """What llama.cpp's converter would write for a tokenizer: scores fall with the rank of the merge."""
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [str(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size())]
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in raw["model"]["merges"]]
    special = {token["content"]: token["special"] for token in raw["added_tokens"]}
    kinds = []
    for token in tokens:
        if token in special:
            kinds.append(TYPES["control" if special[token] else "user_defined"])
        else:
            kinds.append(TYPES["byte" if token.startswith("<0x") else "normal"])
    ranks = {left + right: rank for rank, (left, right) in reversed(list(enumerate(merges)))}
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.scores": [-float(ranks.get(token, len(ranks))) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def tokenizer_from(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and its config, from the written files."""
    files = tokenizer_files_of(metadata, "tiny.gguf")
    return Tokenizer.from_str(files["tokenizer.json"]), json.loads(files["tokenizer_config.json"])


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_bpe_is_the_original(text: str, tmp_path: Path) -> None:
    """A byte-level BPE gives the ids of the tokenizer that its metadata came from, and the text back."""
    folder = write_byte_level(tmp_path)
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    written, _ = tokenizer_from(metadata_of(folder, "gpt2"))
    assert written.encode(text).ids == original.encode(text).ids
    assert written.decode(written.encode(text).ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_is_the_original(text: str, tmp_path: Path) -> None:
    """SentencePiece pieces with scores give the ids of the original; what has no piece is spelled in bytes."""
    folder = write_sentencepiece(tmp_path)
    original = Tokenizer.from_file(str(folder / "tokenizer.json"))
    written, _ = tokenizer_from(metadata_of(folder, "llama"))
    expected = original.encode(text, add_special_tokens=False).ids
    assert written.encode(text).ids == expected
    assert written.decode(expected) == original.decode(expected) == text


@pytest.mark.parametrize(
    "pre", ["default", "gpt-2", "smollm", "starcoder", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"]
)
@pytest.mark.parametrize("text", TEXTS)
def test_every_pre_tokenizer_loses_nothing(pre: str, text: str, tmp_path: Path) -> None:
    """Whatever splits the text, its bytes come back; only Qwen 2 composes characters first."""
    written, _ = tokenizer_from(metadata_of(write_byte_level(tmp_path), "gpt2", pre))
    expected = text.replace("e\u0301", "\u00e9") if pre == "qwen2" else text
    assert written.decode(written.encode(text).ids) == expected


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "x 1234's", ["x", "Ġ1234", "'s"]),
        ("smollm", "x 1234's", ["x", "Ġ", "1", "2", "3", "4", "'s"]),
        ("llama-bpe", "x 1234'S", ["x", "Ġ", "123", "4", "'S"]),
        ("qwen2", "x 1234'S", ["x", "Ġ", "1", "2", "3", "4", "'S"]),
        ("qwen2", "a\n\n  b", ["a", "ĊĊ", "Ġ", "Ġb"]),
        ("gpt-2", "a\n\n  b", ["a", "ĊĊĠ", "Ġb"]),
        ("llama-bpe", "(x)->y", ["(x", ")->", "y"]),
        ("tekken", "camelCaseHTML 12", ["camel", "Case", "HTML", "Ġ", "1", "2"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    """Digits, contractions, line ends and punctuation are cut where the model's own pre-tokenizer cuts them."""
    written, _ = tokenizer_from(metadata_of(write_byte_level(tmp_path), "gpt2", pre))
    assert [piece for piece, _ in written.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_special_tokens_are_one_id(tmp_path: Path) -> None:
    """Control tokens are one id wherever they stand, and are left out of decoded text; user-defined ones are not."""
    folder = write_byte_level(tmp_path)
    written, _ = tokenizer_from(metadata_of(folder, "gpt2"))
    encoded = written.encode("a<|im_start|>user<tool>\n<|im_end|>")
    for token in ("<|im_start|>", "<|im_end|>", "<tool>"):
        assert encoded.tokens.count(token) == 1
    assert written.decode(encoded.ids) == "auser<tool>\n"


@pytest.mark.parametrize(
    ("model", "pre", "stated", "expected"),
    [
        ("gpt2", "gpt-2", None, False),
        ("gpt2", "llama-bpe", None, True),
        ("llama", "default", None, True),
        ("gpt2", "gpt-2", True, True),
        ("llama", "default", False, False),
    ],
)
def test_text_begins_as_the_model_expects(
    model: str, pre: str, stated: bool | None, expected: bool, tmp_path: Path
) -> None:
    """The begin token is added where the file says so, or, where it is silent, as llama.cpp does for the kind."""
    write = write_sentencepiece if model == "llama" else write_byte_level
    metadata = metadata_of(write(tmp_path), model, pre)
    del metadata["tokenizer.ggml.add_bos_token"]
    if stated is not None:
        metadata["tokenizer.ggml.add_bos_token"] = stated
    written, config = tokenizer_from(metadata)
    assert config["add_bos_token"] is expected
    assert (written.encode("a").ids[0] == 1) is expected
    assert written.encode("a", add_special_tokens=False).ids[0] != 1


def test_an_end_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    """`add_eos_token` appends the end token."""
    metadata = {**metadata_of(write_byte_level(tmp_path), "gpt2"), "tokenizer.ggml.add_eos_token": True}
    written, _ = tokenizer_from(metadata)
    assert written.encode("a").ids[-1] == 2


def test_the_config_names_special_tokens_and_template(tmp_path: Path) -> None:
    """Begin, end and padding tokens and the chat template are kept; without a padding token the end token pads."""
    metadata = {**metadata_of(write_byte_level(tmp_path), "gpt2"), "tokenizer.chat_template": "{{ 'é' }}"}
    _, config = tokenizer_from(metadata)
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>", "<|im_end|>", "<|im_end|>",
    )  # fmt: skip
    assert config["chat_template"] == "{{ 'é' }}"


def test_llama3_takes_whole_tokens_before_merging(tmp_path: Path) -> None:
    """A piece that is a token is that token even where merges would not lead to it (`ignore_merges`)."""
    metadata = metadata_of(write_byte_level(tmp_path), "gpt2", "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("zqzq")
    metadata["tokenizer.ggml.token_type"].append(TYPES["normal"])
    written, _ = tokenizer_from(metadata)
    assert written.encode("zqzq", add_special_tokens=False).tokens == ["zqzq"]


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    """An unknown pre-tokenizer or model is named, with those that are known."""
    metadata = metadata_of(write_byte_level(tmp_path), "gpt2", "klingon")
    with pytest.raises(ModelSourceError, match=r"tiny\.gguf.*`klingon`.*known:.*smollm"):
        tokenizer_files_of(metadata, "tiny.gguf")
    with pytest.raises(ModelSourceError, match=r"`t5`.*known: gpt2, llama"):
        tokenizer_files_of({**metadata, "tokenizer.ggml.model": "t5"}, "tiny.gguf")


@pytest.mark.model
def test_smollm2_tokenizes_as_transformers(smollm2_gguf: Path) -> None:
    """The demo model's prompts have the ids that transformers gave them, and any text comes back."""
    files = GgufSource(smollm2_gguf, "0").tokenizer_files()
    written = Tokenizer.from_str(files["tokenizer.json"])
    records = json.loads(REFERENCE.read_text(encoding="utf-8"))["records"]
    assert len(records) >= 20
    for record in records:
        assert written.encode(record["prompt"]).ids == record["prompt_ids"]
    for text in TEXTS:
        assert written.decode(written.encode(text).ids) == text
