"""A build's tokenizer: the ``tokenizers`` library under our limits and errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer as FastTokenizer

from enginehouse_backends.tokenization.vocabulary import Vocabulary
from enginehouse_contract.errors import BuildIntegrityError, InvalidRequestError, refusal
from enginehouse_contract.manifest import CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
_MAX_NORMALIZATION: Final = 4
"""A normalizer may shorten a text, at most about so many times; without one, tokens hold the text's own bytes."""


class Tokenizer:
    """Encodes and decodes as the build's model expects."""

    def __init__(self, fast: FastTokenizer, vocabulary: Vocabulary, config: dict[str, Any]) -> None:
        self._fast = fast
        self.vocabulary = vocabulary
        self.config = config
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.pad_id = self._special_id("pad_token")
        self.chat_template = _default_template(config.get("chat_template"))
        self._max_bytes_per_token = vocabulary.max_token_bytes * (1 if fast.normalizer is None else _MAX_NORMALIZATION)

    def encode(self, text: str | bytes, *, name: str = "text_input", add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of *text*.

        Raises :class:`InvalidRequestError` naming *name* and the offset when *text* is not Unicode.
        """
        try:
            if isinstance(text, bytes):
                text = text.decode()
            else:
                text.encode()  # the library's own complaint about a lone surrogate does not name it
        except UnicodeDecodeError as error:
            raise InvalidRequestError(refusal(name, f"is not valid UTF-8 at byte {error.start}")) from error
        except UnicodeEncodeError as error:
            raise InvalidRequestError(refusal(name, f"holds a lone surrogate at character {error.start}")) from error
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of *token_ids* as the ``tokenizers`` library decodes it."""
        return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def encode_prompt(self, text: str | bytes, max_input_len: int, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt of 1 to *max_input_len* tokens.

        Raises :class:`InvalidRequestError` with the limit and the prompt's own length when it does not fit.
        """
        if len(text) > max_input_len * self._max_bytes_per_token:  # whatever its tokens are, they are too many
            unit = "bytes" if isinstance(text, bytes) else "characters"
            limit, given = f"{max_input_len} tokens", f"{len(text)} {unit}"
            msg = refusal("text_input", "is far too long", limit=limit, given=given, hint="Shorten the prompt.")
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

    def special_id_of(self, text: str) -> int | None:
        """Return the id of the special token whose text this is, or None."""
        token_id = self._fast.token_to_id(text)
        return token_id if token_id is not None and self.vocabulary.is_special(token_id) else None


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
    config = _read_config(build_dir / TOKENIZER_CONFIG_FILE)
    template_path = build_dir / _CHAT_TEMPLATE_FILE  # where Hugging Face folders since 2025 keep it
    if template_path.is_file():
        config["chat_template"] = template_path.read_text(encoding="utf-8")
    return Tokenizer(fast, Vocabulary.from_tokenizer_json(path, _vocab_size(build_dir, fast)), config)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildIntegrityError(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(config, dict):
        raise BuildIntegrityError(f"{path} does not hold an object; it is not a tokenizer's config.")
    return config


def _default_template(value: Any) -> str | None:
    """The chat template of a tokenizer's config: one text, or a list of named ones with a default."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _vocab_size(build_dir: Path, fast: FastTokenizer) -> int:
    """The model's vocabulary, which may be larger than the tokenizer's; the latter where no engine lies beside it."""
    tokenizer_size = 1 + max(fast.get_vocab(with_added_tokens=True).values(), default=-1)
    try:
        config = json.loads((build_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        return max(tokenizer_size, int(config.get("pretrained_config", config)["vocab_size"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return int(tokenizer_size)
