"""Token ids to text as they come: complete characters only, and joined deltas equal to decoding the whole."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from enginehouse_backends.tokenization.vocabulary import Vocabulary


def decode_tokens(vocabulary: Vocabulary, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
    """Decode a whole sequence; invalid bytes become U+FFFD.

    One that begins with a special token (BOS) begins a prompt: see :class:`IncrementalDetokenizer`.
    """
    token_ids = list(token_ids)
    starts_prompt = bool(token_ids) and vocabulary.is_special(token_ids[0]) and skip_special_tokens
    detokenizer = IncrementalDetokenizer(
        vocabulary, skip_special_tokens=skip_special_tokens, starts_prompt=starts_prompt
    )
    return detokenizer.push(token_ids) + detokenizer.flush()


class IncrementalDetokenizer:
    """Decodes one sequence piece by piece, in time linear in its length; holds back the start of a character.

    With *starts_prompt* a SentencePiece text loses the dummy space that its tokenizer puts before a prompt. Generated
    text keeps its first space: it separates the text from the prompt.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True, starts_prompt: bool = False
    ) -> None:
        self._bytes_of = vocabulary.text_bytes_of if skip_special_tokens else vocabulary.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = starts_prompt and not vocabulary.is_byte_level

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became complete with these tokens."""
        return self._trim(self._decoder.decode(b"".join(map(self._bytes_of, token_ids))))

    def flush(self) -> str:
        """Return what was held back, once no more will come: an incomplete character shows as U+FFFD."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if not self._drops_space or not text:
            return text
        self._drops_space = False
        return text.removeprefix(" ")


def complete_prefix_length(vocabulary: Vocabulary, token_ids: Sequence[int]) -> int:
    """Return how many leading tokens can be decoded on their own: they end where a character may still begin.

    What is held back is at most the tokens of one unfinished character; bytes that can become none hold back nothing.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    num_bytes, count = 0, 0
    count_at = {0: 0}  # number of tokens by the bytes they have together
    for num_read, token_id in enumerate(token_ids, start=1):
        text = vocabulary.text_bytes_of(token_id)
        decoder.decode(text)
        unfinished, _ = decoder.getstate()
        num_bytes += len(text)
        count_at[num_bytes] = num_read
        count = count_at.get(num_bytes - len(unfinished), count)
    return count
