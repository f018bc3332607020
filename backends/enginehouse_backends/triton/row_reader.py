"""One row of a batched Triton request, read value by value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from enginehouse_contract.errors import InvalidRequestError, refusal
from enginehouse_contract.tensors import RENAMED_INPUTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


class RowReader:
    """Typed access to row *index* of a request's arrays; every refusal names the field, its bounds and the value."""

    def __init__(self, inputs: Mapping[str, NDArray[Any]], index: int) -> None:
        self._inputs = inputs
        self._index = index

    def array(self, name: str) -> NDArray[Any] | None:
        """The row's values, flat, or None where the input was not sent or is empty."""
        array = self._inputs.get(name)
        if array is None:
            return None
        row = np.asarray(array[self._index])
        return row if row.size else None

    def scalar(self, name: str) -> Any:
        """The row's first value, or None."""
        row = self.array(name)
        return None if row is None else row.reshape(-1)[0].item()

    def renamed(self, old_name: str) -> tuple[str, Any]:
        """The value under either generation's name; both with different values is refused."""
        new_name = RENAMED_INPUTS[old_name]
        old, new = self.scalar(old_name), self.scalar(new_name)
        if old is not None and new is not None and old != new:
            msg = refusal(
                new_name, f"and its older name `{old_name}` were both sent and differ", given=f"{new} and {old}"
            )
            raise InvalidRequestError(msg)
        return (new_name, new) if new is not None else (old_name, old)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self.scalar(name)
        return default if value is None else bool(value)

    def number(self, name: str, default: float, low: float, high: float = math.inf) -> float:
        """A finite number in [low, high]."""
        value = self.scalar(name)
        if value is None:
            return default
        if not math.isfinite(value) or not low <= value <= high:
            bounds = [f"at least {low:g}"] if math.isfinite(low) else []
            bounds += [f"at most {high:g}"] if math.isfinite(high) else []
            problem = f"must be a finite number{',' if bounds else ''} {' and '.join(bounds)}".rstrip()
            raise InvalidRequestError(refusal(name, problem, given=value))
        return float(value)

    def integer(self, name: str, default: int, low: int, high: int | None = None) -> int:
        """An integer in [low, high]."""
        value = self.scalar(name)
        if value is None:
            return default
        if value < low or (high is not None and value > high):
            bounds = f"from {low} to {high}" if high is not None else f"at least {low}"
            raise InvalidRequestError(refusal(name, f"must be {bounds}", given=value))
        return int(value)

    def text(self, name: str) -> str | None:
        """The row's first string, decoded; invalid UTF-8 is refused with its offset."""
        value = self._inputs.get(name)
        if value is None or value[self._index].size == 0:
            return None
        return decode_text(value[self._index].reshape(-1)[0], name)

    def texts(self, name: str) -> list[str]:
        """All of the row's strings, decoded."""
        value = self._inputs.get(name)
        return [] if value is None else [decode_text(item, name) for item in value[self._index].reshape(-1)]


def decode_text(value: Any, name: str) -> str:
    """Decode one element of a STRING tensor; raise :class:`InvalidRequestError` naming the offset of a bad byte."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(refusal(name, f"is not valid UTF-8 at byte {error.start}")) from error
