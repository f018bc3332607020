"""The two small tokenizers, loaded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.small_tokenizers import write_byte_level, write_sentencepiece

from enginehouse_backends.tokenization.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from enginehouse_backends.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE."""
    return load_tokenizer(write_byte_level(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Pieces with a visible space, byte fallback and a dummy space before the text."""
    return load_tokenizer(write_sentencepiece(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of the two in turn."""
    loaded: Tokenizer = request.getfixturevalue(request.param)
    return loaded
