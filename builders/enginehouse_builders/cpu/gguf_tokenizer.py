"""Tokenizer files from a GGUF's metadata, in Hugging Face's formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from enginehouse_contract.errors import ModelSourceError
from enginehouse_contract.manifest import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # ggml's types of tokens

_GPT2_SPLIT: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a byte-level BPE splits text: each pattern splits what the ones before it left."""

    patterns: tuple[str, ...]
    adds_bos: bool = False  # where the file does not say
    ignores_merges: bool = False  # a piece that is a token is not merged from its bytes
    composes_characters: bool = False  # Unicode normalization form C


_LLAMA3: Final = _PreTokenizer((_LLAMA3_SPLIT,), adds_bos=True, ignores_merges=True)
_DIGITS_GPT2: Final = _PreTokenizer((r"\p{N}", _GPT2_SPLIT))
_DEFAULT: Final = "default"
_PRE_TOKENIZERS: Final = {
    _DEFAULT: _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2_SPLIT,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _PreTokenizer((_QWEN2_SPLIT,), composes_characters=True),
    "deepseek-r1-qwen": _PreTokenizer((_QWEN2_SPLIT,)),
    "tekken": _PreTokenizer((_TEKKEN_SPLIT,), adds_bos=True, ignores_merges=True),
}
"""By GGUF's ``tokenizer.ggml.pre``; patterns as in llama.cpp's ``llama-vocab.cpp``."""


def tokenizer_files_of(metadata: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` made from GGUF metadata.

    Raises :class:`ModelSourceError` for a tokenizer or pre-tokenizer that is not known, by name, and for a vocabulary
    that does not hold together.
    """
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ModelSourceError(f"{where} carries no tokenizer.")
    model = metadata.get("tokenizer.ggml.model")
    name = str(metadata.get("tokenizer.ggml.pre", _DEFAULT))
    if model not in {"gpt2", "llama"}:
        raise ModelSourceError(f"{where}: the tokenizer `{model}` is not known; known: gpt2, llama.")
    if model == "gpt2" and name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelSourceError(f"{where}: the pre-tokenizer `{name}` is not known; known: {known}.")
    try:
        if model == "gpt2":
            tokenizer = _byte_level_bpe(metadata, tokens, _PRE_TOKENIZERS[name])
        else:
            tokenizer = _sentencepiece(metadata, tokens)
        _add_special_tokens(tokenizer, tokens, _token_types(metadata, tokens))
    except Exception as error:  # the library raises bare Exception
        raise ModelSourceError(f"{where}: its tokenizer is damaged ({error}).") from error
    config = _config(metadata, tokens, adds_bos_by_default=model == "llama" or _PRE_TOKENIZERS[name].adds_bos)
    _frame(tokenizer, config)
    return {
        TOKENIZER_FILE: tokenizer.to_str(pretty=False),
        TOKENIZER_CONFIG_FILE: json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
    }


def _config(metadata: Mapping[str, Any], tokens: list[str], *, adds_bos_by_default: bool) -> dict[str, Any]:
    def token(name: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    config = {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding") or token("eos"),
        "unk_token": token("unknown"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {name: value for name, value in config.items() if value is not None}


def _frame(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Let encoding add the tokens that begin and end a text."""
    framing = {name: config[f"{name}_token"] for name in ("bos", "eos") if config[f"add_{name}_token"]}
    if framing:
        template = [
            *([framing["bos"]] if "bos" in framing else []),
            "$A",
            *([framing["eos"]] if "eos" in framing else []),
        ]
        special = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(framing.values())]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _token_types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    return metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    for token, kind in zip(tokens, types, strict=True):
        if kind in {_UNKNOWN, _CONTROL}:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], pre: _PreTokenizer) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignores_merges))
    if pre.composes_characters:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """A SentencePiece vocabulary as BPE with byte fallback: of two neighbours, the pair of the best score merges first.

    Merges are ranked as transformers' ``SentencePieceExtractor`` does.
    """
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    ids = {token: index for index, token in enumerate(tokens)}
    ranked: list[tuple[float, str, str]] = []
    for token, kind, score in zip(tokens, _token_types(metadata, tokens), scores, strict=True):
        if kind == _NORMAL:
            halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [(left, right) for left, right in halves if left in ids and right in ids]
            known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            ranked.extend((score, left, right) for left, right in known)
    ranked.sort(key=lambda merge: -merge[0])
    merges = [(left, right) for _, left, right in ranked]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unk_token = tokens[unknown] if unknown is not None else None
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("\u2581")] if has_prefix else []
    strip = [decoders.Strip(content=" ", left=1, right=0)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
