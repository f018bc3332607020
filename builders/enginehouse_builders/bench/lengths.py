"""How long prompts and answers are: one number, or a distribution of numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from enginehouse_contract.errors import InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LENGTH: Final = 1_000_000
"""Longest length that makes sense, in tokens; draws are clipped to it."""

FORMS: Final = "128, uniform:16,256, lognormal:128,0.8 (median, sigma) or file:lengths.txt (one a line)"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens; ``text`` is how it was written."""

    text: str
    _draw: Callable[[np.random.Generator], float] = field(repr=False, compare=False)

    def draw(self, random: np.random.Generator) -> int:
        """Return one length, at least 1."""
        return int(min(max(round(self._draw(random)), 1), MAX_LENGTH))


def parse_lengths(text: str, field_name: str) -> Lengths:
    """Read a distribution: a number, ``uniform:LOW,HIGH``, ``lognormal:MEDIAN,SIGMA`` or ``file:PATH``.

    Raises :class:`InvalidRequestError` that names *field_name*, or the file and its line.

    >>> parse_lengths("64", "output_tokens").draw(np.random.default_rng(0))
    64
    """
    kind, _, rest = text.partition(":")
    if not rest:
        (length,) = _numbers(text, 1, field_name, text)
        _require(length >= 1, "must be at least 1", field_name, text)
        return Lengths(text, lambda _: length)
    if kind == "uniform":
        low, high = _numbers(rest, 2, field_name, text)
        _require(1 <= low <= high, "must have 1 <= LOW <= HIGH", field_name, text)
        return Lengths(text, lambda random: float(random.integers(int(low), int(high), endpoint=True)))
    if kind == "lognormal":
        median, sigma = _numbers(rest, 2, field_name, text)
        _require(median >= 1 and sigma >= 0, "must have MEDIAN >= 1 and SIGMA >= 0", field_name, text)
        return Lengths(text, lambda random: float(random.lognormal(np.log(median), sigma)))
    if kind == "file":
        values = _read_file(Path(rest), field_name)
        return Lengths(text, lambda random: values[int(random.integers(len(values)))])
    raise InvalidRequestError(refusal(field_name, "is of an unknown distribution", given=text, hint=f"Known: {FORMS}."))


def _numbers(text: str, count: int, field_name: str, given: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    is_good = len(numbers) == count and all(abs(number) <= MAX_LENGTH for number in numbers)
    _require(is_good, f"takes {FORMS}, with numbers up to {MAX_LENGTH}", field_name, given)
    return numbers


def _require(is_met: bool, problem: str, field_name: str, given: str) -> None:
    if not is_met:
        raise InvalidRequestError(refusal(field_name, problem, given=given))


def _read_file(path: Path, field_name: str) -> list[int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidRequestError(
            refusal(field_name, f"names a file that cannot be read ({reason})", given=str(path))
        ) from None
    values = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            if not line.strip().isdigit() or not 1 <= int(line) <= MAX_LENGTH:
                raise InvalidRequestError(
                    f"{path}:{number}: must be a whole number from 1 to {MAX_LENGTH}; given {line[:40]!r}."
                )
            values.append(int(line))
    if not values:
        raise InvalidRequestError(refusal(field_name, "names a file without a length in it", given=str(path)))
    return values
