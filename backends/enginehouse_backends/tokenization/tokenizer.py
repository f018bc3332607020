"""A build's tokenizer: the ``tokenizers`` library under our limits and errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer as FastTokenizer

from enginehouse_backends.tokenization.vocabulary import Vocabulary
from enginehouse_contract.errors import BuildIntegrityError, InvalidRequestError, refusal
from enginehouse_contract.manifest import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from pathlib import Path

_MAX_BYTES_PER_TOKEN: Final = 64
"""More bytes than this many per token of the limit cannot fit in practice; such a prompt is refused unread."""


class Tokenizer:
    """Encodes and decodes as the build's model expects."""

    def __init__(self, fast: FastTokenizer, vocabulary: Vocabulary, config: dict[str, Any]) -> None:
        self._fast = fast
        self.vocabulary = vocabulary
        self.config = config
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.pad_id = self._special_id("pad_token")
        template = config.get("chat_template")
        self.chat_template: str | None = template if isinstance(template, str) else None

    def encode(self, text: str | bytes, *, name: str = "text_input", add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of *text*.

        Raises :class:`InvalidRequestError` naming *name* and the offset when bytes are not UTF-8.
        """
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InvalidRequestError(refusal(name, f"is not valid UTF-8 at byte {error.start}")) from error
        try:
            return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        except UnicodeEncodeError as error:
            raise InvalidRequestError(refusal(name, f"holds a lone surrogate at character {error.start}")) from error

    def encode_prompt(self, text: str | bytes, max_input_len: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt of 1 to *max_input_len* tokens.

        Raises :class:`InvalidRequestError` with the limit and the prompt's own length when it does not fit.
        """
        max_bytes = max_input_len * _MAX_BYTES_PER_TOKEN
        if len(text) > max_bytes:
            limit = f"{max_input_len} tokens"
            msg = refusal("text_input", "is far too long", limit=limit, given=f"{len(text)} bytes", hint="Shorten it.")
            raise InvalidRequestError(msg)
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise InvalidRequestError(refusal("text_input", "is empty; a prompt needs at least one token"))
        if len(ids) > max_input_len:
            limit, given = f"{max_input_len} tokens", f"{len(ids)} tokens"
            msg = refusal("text_input", "is too long", limit=limit, given=given, hint="Shorten the prompt.")
            raise InvalidRequestError(msg)
        return ids

    def special_text(self, name: str) -> str:
        """Return the text of a special token of the config (``bos_token``, ...), or an empty text."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else ""

    def _special_id(self, name: str) -> int | None:
        text = self.special_text(name)
        return self._fast.token_to_id(text) if text else None


def load_tokenizer(build_dir: Path) -> Tokenizer:
    """Load the tokenizer of a build (or of any folder with Hugging Face tokenizer files).

    Raises :class:`BuildIntegrityError` when a file is missing or cannot be read.
    """
    path = build_dir / TOKENIZER_FILE
    if not path.is_file():
        raise BuildIntegrityError(f"{build_dir} has no {TOKENIZER_FILE}; rebuild, or correct `tokenizer_dir`.")
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BuildIntegrityError(f"{path} is not a readable tokenizer ({error}).") from error
    fast.no_truncation()
    fast.no_padding()
    config_path = build_dir / TOKENIZER_CONFIG_FILE
    try:
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
    except (OSError, ValueError) as error:
        raise BuildIntegrityError(f"{config_path} is not readable JSON ({error}).") from error
    return Tokenizer(fast, Vocabulary.from_tokenizer_json(path, _vocab_size(build_dir, fast)), config)


def _vocab_size(build_dir: Path, fast: FastTokenizer) -> int:
    """The model's vocabulary, which may be larger than the tokenizer's; the latter where no engine lies beside it."""
    tokenizer_size = 1 + max(fast.get_vocab(with_added_tokens=True).values(), default=-1)
    try:
        config = json.loads((build_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        return max(tokenizer_size, int(config["pretrained_config"]["vocab_size"]))
    except (OSError, ValueError, KeyError, TypeError):
        return int(tokenizer_size)
