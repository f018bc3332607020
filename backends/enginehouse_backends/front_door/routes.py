"""Which release answers a request: chosen once, for the whole request.

The route table is a JSON file in the live repository, read again when it changes, so that a promotion or a canary
weight takes effect between two requests without a reload::

    {"by": "tenant",
     "routes": [{"release": "r12", "weight": 95, "engine_model": "tensorrt_llm-r12", "draft_model": null,
                 "tokenizer_dir": "...", "engine_dir": "...", "build_id": "sha256:..."}, ...]}

Weights are shares of the requests. A sticky key always gets the same release while weights stay as they are; `by` says
whether that key is the tenant (where a request names one) or the request's id.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

ROUTES_FILE: Final = "routes.json"
_CHECK_PERIOD_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Route:
    """One release as the front door calls it. ``weight`` is its share; 0 receives nothing."""

    release: str
    engine_model: str
    tokenizer_dir: str
    engine_dir: str
    build_id: str
    draft_model: str | None = None
    weight: float = 1.0


def parse_routes(text: str) -> tuple[Route, ...]:
    """Parse a route table; raise :class:`ConfigurationError` saying which entry is wrong and how."""
    try:
        entries = json.loads(text)["routes"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{ROUTES_FILE} must be a JSON object with a list `routes` ({error}).") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError(f"{ROUTES_FILE}: `routes` must be a list with at least one entry.")
    routes = tuple(_parse_route(entry, index) for index, entry in enumerate(entries))
    if not sum(route.weight for route in routes) > 0:
        raise ConfigurationError(f"{ROUTES_FILE}: the weights add up to 0; no release would answer.")
    return routes


def parse_sticky_by(text: str) -> str:
    """Return what sticks to a release: tenant, unless the table says request."""
    by = json.loads(text).get("by", "tenant")
    if by not in {"tenant", "request"}:
        raise ConfigurationError(f"{ROUTES_FILE}: `by` must be tenant or request; given {by!r}.")
    return str(by)


def _parse_route(entry: Any, index: int) -> Route:
    where = f"{ROUTES_FILE}: route {index}"
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} must be an object.")
    known = {field.name for field in fields(Route)}
    if unknown := sorted(set(entry) - known):
        raise ConfigurationError(f"{where} has unknown keys: {', '.join(unknown)}.")
    try:
        route = Route(**entry)
    except TypeError as error:
        raise ConfigurationError(f"{where}: {error}.") from error
    if (
        isinstance(route.weight, bool)
        or not isinstance(route.weight, int | float)
        or not 0 <= route.weight < float("inf")
    ):
        raise ConfigurationError(f"{where}: `weight` must be a number of at least 0; given {route.weight!r}.")
    return route


class RouteTable:
    """The current routes, from a file if there is one, else the *default* of the model's own parameters.

    A file that cannot be read or is wrong leaves the last good table in force; ``last_error`` says why.
    """

    def __init__(self, path: Path, default: Route) -> None:
        self._path = path
        self._routes: tuple[Route, ...] = (default,)
        self._default = default
        self._seen: tuple[int, int] | None = None
        self._next_check_s = 0.0
        self._lock = threading.Lock()
        self.last_error: str | None = None
        self.sticky_by = "tenant"

    def choose(self, key: str) -> Route:
        """Return the release for a request with this sticky *key*."""
        routes = self.current()
        point = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
        point *= sum(route.weight for route in routes)
        for route in routes:
            point -= route.weight
            if point < 0:
                return route
        return routes[-1]

    def current(self) -> tuple[Route, ...]:
        """Return the routes, reading the file again when it changed."""
        with self._lock:
            if (now_s := time.monotonic()) >= self._next_check_s:
                self._next_check_s = now_s + _CHECK_PERIOD_S
                self._refresh()
            return self._routes

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except OSError:
            self._seen, self._routes, self.last_error = None, (self._default,), None
            return
        seen = (status.st_mtime_ns, status.st_ino)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            text = self._path.read_text(encoding="utf-8")
            self._routes, self.sticky_by = parse_routes(text), parse_sticky_by(text)
            self.last_error = None
        except (OSError, UnicodeDecodeError, ConfigurationError) as error:
            self.last_error = str(error)
