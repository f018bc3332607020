"""Whether two builds read and word prompts alike; and prompts as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginehouse_builders.gates.prompts import Prompt
    from enginehouse_builders.gates.services import PromptEncoder
    from enginehouse_contract.manifest import Manifest


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's token ids. ``is_text``: plain text, not a conversation."""

    where: str
    token_ids: tuple[int, ...]
    is_text: bool


def encode_prompts(prompts: Sequence[Prompt], encoder: PromptEncoder, max_tokens: int) -> tuple[EncodedPrompt, ...]:
    """Return prompts as their first *max_tokens* token ids.

    Left out are conversations where the build has no chat template, and prompts of one token, which predicts nothing.
    """
    encoded = []
    for prompt in prompts:
        ids = encoder.encode(prompt.text) if prompt.text is not None else encoder.encode_chat(prompt.messages)
        cut = tuple(ids or ())[:max_tokens]
        if len(cut) > 1:
            encoded.append(EncodedPrompt(prompt.where, cut, prompt.text is not None))
    return tuple(encoded)


def tokenizer_difference(
    build: Manifest,
    reference: Manifest,
    prompts: Sequence[Prompt],
    build_encoder: PromptEncoder,
    reference_encoder: PromptEncoder,
) -> str | None:
    """Say how two builds' tokenizers or chat templates differ, or None where they do not.

    Equal digests settle it. Files of other bytes may still do the same (one tokenizer read from a GGUF file and from a
    Hugging Face folder), so they are tried on every prompt.
    """
    is_same_tokenizer = build.tokenizer_sha256 == reference.tokenizer_sha256
    is_same_template = build.chat_template_sha256 == reference.chat_template_sha256
    if is_same_tokenizer and is_same_template:
        return None
    for prompt in prompts:
        if prompt.text is not None and not is_same_tokenizer:
            if build_encoder.encode(prompt.text) != reference_encoder.encode(prompt.text):
                return f"the tokenizers differ: the prompt at {prompt.where} has other tokens"
        elif prompt.messages and build_encoder.encode_chat(prompt.messages) != reference_encoder.encode_chat(
            prompt.messages
        ):
            return f"the chat templates differ: the conversation at {prompt.where} is rendered to other tokens"
    return None
