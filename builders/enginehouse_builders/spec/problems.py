"""What is wrong with a spec: a list of problems, each with its place, so that one reading shows them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the field by its dotted path, its line in the file (from 1), and what to do."""

    field: str
    message: str  # names field, limit, value given, what to do
    line: int | None = None

    def located(self, where: str) -> str:
        """Return the message behind the place it is about."""
        return f"{where}:{self.line}: {self.message}" if self.line else f"{where}: {self.message}"


class SpecError(ConfigurationError):
    """A spec that cannot be used; ``problems`` has all that is wrong, the message the first of them."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where = where
        self.problems = tuple(problems)
        more = len(problems) - 1
        rest = f" ({more} more: see `enginehouse spec check`)" if more > 0 else ""
        super().__init__(problems[0].located(where) + rest)
