"""Reading the ``parameters`` of a model's config.pbtxt: typed, and an error for a bad value, never a default.

NVIDIA's template leaves an unset parameter as "" or as its literal placeholder (``${name}``); both mean unset.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import TYPE_CHECKING, Any

from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

_PLACEHOLDER = re.compile(r"\$\{.*\}")
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


class ModelParameters:
    """Typed access to the string parameters of one model config."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = {
            name: value.strip()
            for name, value in values.items()
            if value.strip() and not _PLACEHOLDER.fullmatch(value.strip())
        }

    @classmethod
    def from_model_config(cls, model_config: str) -> ModelParameters:
        """Read Triton's JSON of a model config (``args["model_config"]``)."""
        parameters: dict[str, Any] = json.loads(model_config).get("parameters", {})
        return cls({name: str(value.get("string_value", "")) for name, value in parameters.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def check_names(self, known: Iterable[str]) -> None:
        """Raise :class:`ConfigurationError` for a set parameter that is not *known*, with the nearest name."""
        names = sorted(known)
        for name in self._values:
            if name not in names:
                nearest = difflib.get_close_matches(name, names, n=1)
                hint = f"Did you mean `{nearest[0]}`?" if nearest else "Remove it from config.pbtxt."
                raise ConfigurationError(refusal(name, "is not a parameter of this model", hint=hint))

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter as text."""
        return self._values.get(name, default)

    def required(self, name: str) -> str:
        """Return a parameter that must be set."""
        if name not in self._values:
            raise ConfigurationError(refusal(name, "is required and is not set", hint="Set it in config.pbtxt."))
        return self._values[name]

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean parameter."""
        if name not in self._values:
            return default
        value = self._values[name].lower()
        if value in _TRUE or value in _FALSE:
            return value in _TRUE
        raise ConfigurationError(refusal(name, "must be true or false", given=self._values[name]))

    def integer(self, name: str, default: int, low: int) -> int:
        """Return an integer parameter of at least *low*."""
        return int(self._number(name, default, low, math.inf, int))

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a number in [low, high]."""
        return self._number(name, default, low, high, float)

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Return one of *choices*, compared without case."""
        value = self._values.get(name, default).lower()
        allowed = tuple(choices)
        if value not in allowed:
            raise ConfigurationError(
                refusal(name, f"must be one of {', '.join(allowed)}", given=self._values.get(name))
            )
        return value

    def _number(self, name: str, default: float, low: float, high: float, kind: type[int | float]) -> float:
        if name not in self._values:
            return default
        text = self._values[name]
        bounds = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
        noun = "an integer" if kind is int else "a number"
        try:
            value = kind(text)
        except ValueError:
            raise ConfigurationError(refusal(name, f"must be {noun} {bounds}", given=text)) from None
        if not low <= value <= high:
            raise ConfigurationError(refusal(name, f"must be {noun} {bounds}", given=text))
        return value
