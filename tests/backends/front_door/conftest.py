"""A byte-per-token vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from enginehouse_backends.tokenization.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def byte_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """One token per byte, in byte order, and <end> as 256."""
    alphabet = {character: index for index, character in enumerate(_bytes_to_unicode())}
    tokenizer = FastTokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    path: Path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return Vocabulary.from_tokenizer_json(path, 257)


def _bytes_to_unicode() -> list[str]:
    """GPT-2's printable stand-in of every byte, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte if byte in printable else next(extra)) for byte in range(256)]
