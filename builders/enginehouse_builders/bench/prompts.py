"""Prompts of about a given number of tokens, made of words that are one token in nearly every vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np

_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "kid body information back parent face others level office door health person art war history party result "
    "change morning reason research girl guy moment air teacher force education foot boy age policy music market "
    "sense nation plan college interest death experience effect use class control field development role effort "
    "rate heart drug show leader light voice wife whole police mind price report decision son view town road "
    "drive arm difference value building action season society tax director position player record paper space "
    "ground form event official matter center couple site project"
)
_WORDS: Final = _TEXT.split()


def make_prompt(num_tokens: int, random: np.random.Generator) -> str:
    """Return random words, about one token each; the exact count is the server's to tell."""
    return " ".join(_WORDS[index] for index in random.integers(0, len(_WORDS), num_tokens))
