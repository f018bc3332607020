"""Two small tokenizers, made with the `tokenizers` library: byte-level BPE and one in the manner of SentencePiece."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The end, the END, ending: the endless end of it all!",
    "Streams of tokens become text; tokens may split characters, text may not. 1234567890 1234567890",
    "def main(argument):\n    return argument + 1\n\n    # the end\n",
    "naïve café übergroß Äpfel, 你好世界 你好 こんにちは, привет мир, 🎉🎉 party 👩‍👩‍👧 family, e\u0301 combining",
] * 3
CHAT_TEMPLATE = (
    "{% for message in messages %}\n"
    "  {% if message['role'] == 'tool' %}\n"
    "    {{ raise_exception('no tools here') }}\n"
    "  {% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_byte_level(folder: Path, **config: Any) -> Path:
    """Write a byte-level BPE tokenizer with chat tokens into *folder*; *config* replaces entries of its config."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|im_end|>"}
    return _write(folder, tokenizer, {**names, "chat_template": CHAT_TEMPLATE, **config})


def write_sentencepiece(folder: Path, **config: Any) -> Path:
    """Write a BPE tokenizer with byte fallback and a dummy space before the text, as Llama 2 has it."""
    special = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = _spaces_as_pieces()
    trained.train_from_iterator(
        [text.replace("🎉", "") for text in CORPUS],  # left to the byte fallback
        trainers.BpeTrainer(vocab_size=450, special_tokens=[*special, *byte_pieces], show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, **options))
    tokenizer.normalizer = _spaces_as_pieces()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _write(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", **config})


def _spaces_as_pieces() -> normalizers.Sequence:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
