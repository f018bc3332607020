"""Builds whose engine is a table of next-token logits, served without a server: gates run over them in milliseconds."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from tests.support.small_builds import write_build

from enginehouse_builders.store import StoredBuild
from enginehouse_contract.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

VOCAB_SIZE = 300
SHAPE = {
    "architecture": "LlamaForCausalLM",
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_size": 16,
    "intermediate_size": 32,
    "hidden_size": 16,
    "vocab_size": VOCAB_SIZE,
}


def make_table(seed: int = 0) -> NDArray[np.float32]:
    """Return logits of the next token by token, [vocab, vocab]: random, but printable characters are likelier."""
    table = np.random.default_rng(seed).normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    table[:, 32:127] += 4
    return table


def write_bigram_build(store: Path, name: str, **pretrained: object) -> StoredBuild:
    """Write a build that says it runs under the OpenVINO of this host; *pretrained* changes its ``config.json``."""
    config = json.dumps({"pretrained_config": {**SHAPE, **pretrained}}).encode()
    folder = write_build(store, name=name, files={"config.json": config, "weights.bin": name.encode()})
    return StoredBuild(folder, read_manifest(folder))


class ByteEncoder:
    """UTF-8 bytes as token ids, plus *offset*; conversations are their contents, or unknown without a template."""

    def __init__(self, *, offset: int = 0, has_template: bool = True) -> None:
        self._offset, self._has_template = offset, has_template

    def encode(self, text: str) -> list[int]:
        return [byte + self._offset for byte in text.encode()]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        text = "\n".join(message["content"] for message in messages)
        return self.encode(text) if self._has_template else None


@dataclass
class BigramService:
    """Answers by table."""

    table: NDArray[np.float32]
    served_build_id: str
    num_asked: int = 0

    def stream(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[list[int]]:
        self.num_asked += 1
        token = token_ids[-1]
        for _ in range(num_tokens):
            token = int(np.nan_to_num(self.table[token]).argmax())
            yield [token]

    def context_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return self.table[np.array(token_ids)]


@dataclass
class BigramTools:
    """Serves tables by build name; notes what is loaded and unloaded, in order."""

    tables: dict[str, NDArray[np.float32]]
    encoders: dict[str, ByteEncoder] = field(default_factory=dict)
    served_ids: dict[str, str] = field(default_factory=dict)  # where a server would say another build
    load_errors: dict[str, Exception] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def encoder(self, build: StoredBuild) -> ByteEncoder:
        return self.encoders.get(build.manifest.model_name, ByteEncoder())

    @contextmanager
    def serve(self, build: StoredBuild) -> Iterator[BigramService]:
        name = build.manifest.model_name
        if name in self.load_errors:
            raise self.load_errors[name]
        self.events.append(f"+{name}")
        yield BigramService(self.tables[name], self.served_ids.get(name, build.manifest.build_id))
        self.events.append(f"-{name}")
