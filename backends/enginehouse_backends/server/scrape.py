"""Reading a server's Prometheus metrics: series by name and labels."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from enginehouse_contract.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT_S: Final = 5.0
_LINE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+.\deEnaINF]+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Series:
    """One series and its value now."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_metrics(metrics_url: str) -> list[Series]:
    """Return every series of a metrics page; raise :class:`EngineUnavailableError` when it cannot be read."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - an http:// address of ours
            text = response.read().decode(errors="replace")
    except (urllib.error.URLError, OSError) as error:
        raise EngineUnavailableError(f"the metrics at {metrics_url} cannot be read ({error}).") from error
    return parse_metrics(text)


def parse_metrics(text: str) -> list[Series]:
    """Parse a metrics page in Prometheus' text format.

    >>> parse_metrics('rows{release="r1",state="open"} 3')
    [Series(name='rows', labels={'release': 'r1', 'state': 'open'}, value=3.0)]
    """
    return [Series(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])) for match in _LINE.finditer(text)]
