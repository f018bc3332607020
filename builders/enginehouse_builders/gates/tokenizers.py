"""Whether two builds read and word prompts alike; and prompts as token ids, checked against what builds can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginehouse_contract.errors import ConfigurationError

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


def encode_prompts(
    prompts: Sequence[Prompt], encoder: PromptEncoder, max_input_len: int, field: str = "--prompts"
) -> tuple[EncodedPrompt, ...]:
    """Return prompts as token ids; conversations are passed over where the build has no chat template.

    Raises :class:`ConfigurationError` naming the line of a prompt that is longer than *max_input_len* tokens.
    """
    encoded = []
    for prompt in prompts:
        ids = encoder.encode(prompt.text) if prompt.text is not None else encoder.encode_chat(prompt.messages)
        if ids is None:
            continue
        if len(ids) > max_input_len:
            raise ConfigurationError(
                f"`{field}`: the prompt at {prompt.where} has {len(ids)} tokens, and the builds leave room for "
                f"{max_input_len}; shorten it."
            )
        if len(ids) > 1:  # one token predicts nothing of the prompt
            encoded.append(EncodedPrompt(prompt.where, tuple(ids), prompt.text is not None))
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
