"""Tokenizer files from a GGUF's metadata, in Hugging Face's formats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from enginehouse_contract.errors import ModelSourceError
from enginehouse_contract.manifest import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

_CONTROL_TOKEN: Final = 3  # ggml's token types
_USER_DEFINED_TOKEN: Final = 4

_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

_PRE_TOKENIZERS: Final[dict[str, Callable[[], Any]]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "llama-bpe": lambda: _regex_then_bytes(_LLAMA3_SPLIT),
    "qwen2": lambda: _regex_then_bytes(_QWEN2_SPLIT),
}
"""GGUF's ``tokenizer.ggml.pre`` -> pre-tokenizer of a byte-level BPE."""


def tokenizer_files_of(field: Callable[[str], Any], where: str) -> dict[str, str]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` made from GGUF metadata.

    Raises :class:`ModelSourceError` for a tokenizer or pre-tokenizer that is not known, by name.
    """
    model = field("tokenizer.ggml.model")
    tokens: list[str] = field("tokenizer.ggml.tokens") or []
    types: list[int] = field("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens:
        raise ModelSourceError(f"{where} carries no tokenizer.")
    if model == "gpt2":
        tokenizer = _byte_level_bpe(field, tokens, where)
    elif model == "llama":
        tokenizer = _sentencepiece(field, tokens)
    else:
        raise ModelSourceError(f"{where}: the tokenizer `{model}` is not known; known: gpt2, llama.")
    special = [
        AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in {_CONTROL_TOKEN, _USER_DEFINED_TOKEN}
    ]
    tokenizer.add_special_tokens([token for token in special if token.special])
    tokenizer.add_tokens([token for token in special if not token.special])
    names = {
        name: tokens[int(index)]
        for name in ("bos", "eos", "padding", "unknown")
        if (index := field(f"tokenizer.ggml.{name}_token_id")) is not None and 0 <= int(index) < len(tokens)
    }
    if field("tokenizer.ggml.add_bos_token") and "bos" in names:
        template = processors.TemplateProcessing(
            single=f"{names['bos']} $A", special_tokens=[(names["bos"], tokenizer.token_to_id(names["bos"]))]
        )
        tokenizer.post_processor = template
    config: dict[str, Any] = {
        "bos_token": names.get("bos"),
        "eos_token": names.get("eos"),
        "pad_token": names.get("padding", names.get("eos")),
        "unk_token": names.get("unknown"),
        "add_bos_token": bool(field("tokenizer.ggml.add_bos_token")),
        "chat_template": field("tokenizer.chat_template"),
    }
    return {
        TOKENIZER_FILE: tokenizer.to_str(pretty=False),
        TOKENIZER_CONFIG_FILE: json.dumps(
            {name: value for name, value in config.items() if value is not None}, indent=2, sort_keys=True
        ),
    }


def _byte_level_bpe(field: Callable[[str], Any], tokens: list[str], where: str) -> Tokenizer:
    name = field("tokenizer.ggml.pre") or "gpt-2"
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelSourceError(f"{where}: the pre-tokenizer `{name}` is not known; known: {known}.")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(field: Callable[[str], Any], tokens: list[str]) -> Tokenizer:
    """A SentencePiece vocabulary as BPE with byte fallback: pieces that merge earlier have the higher score."""
    scores: list[float] = field("tokenizer.ggml.scores") or [0.0] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token in sorted(ids, key=lambda piece: -scores[ids[piece]]):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((scores[ids[token]], left, right))
    ranked = [(left, right) for _, left, right in sorted(merges, key=lambda merge: -merge[0])]
    unknown = field("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=ranked,
            unk_token=tokens[int(unknown)] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("\u2581")] if field("tokenizer.ggml.add_space_prefix") in {None, True} else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def _regex_then_bytes(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
