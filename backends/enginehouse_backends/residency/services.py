"""The services of one host: what a request's ``service`` names, and the memory they share.

From ``residency.json``::

    {"memory_budget_bytes": 2147483648, "max_wait_s": 30, "idle_unload_s": 600, "grpc_url": null,
     "services": [{"name": "coder", "engine_model": "tensorrt_llm-coder-3991582e", "num_bytes": 700000000,
                   "pinned": false, "tokenizer_dir": "...", "engine_dir": "...", "build_id": "sha256:..."}]}

Written by `enginehouse services apply`, by rename; read again when it changes, without a reload.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from enginehouse_backends.front_door.routes import Route
from enginehouse_backends.residency.records import ManagedEngine, ResidencyLimits
from enginehouse_contract.errors import ConfigurationError, InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SERVICES_FILE: Final = "residency.json"
SERVICE_PARAMETER: Final = "service"
"""The request parameter that names a service; without it a request goes to the stage's release."""

_CHECK_PERIOD_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Services:
    """A parsed file. ``grpc_url`` is the server to administer; None: the one that this state folder runs."""

    limits: ResidencyLimits
    routes: Mapping[str, Route]
    engines: tuple[ManagedEngine, ...]
    grpc_url: str | None = None


NO_SERVICES: Final = Services(ResidencyLimits(0), {}, ())


def parse_services(text: str) -> Services:
    """Parse the file's text; raise :class:`ConfigurationError` saying what is wrong."""
    try:
        raw: dict[str, Any] = json.loads(text)
        idle_unload_s = raw.get("idle_unload_s")
        limits = ResidencyLimits(
            memory_budget_bytes=int(raw["memory_budget_bytes"]),
            max_wait_s=float(raw["max_wait_s"]),
            idle_unload_s=None if idle_unload_s is None else float(idle_unload_s),
        )
        services = raw["services"]
        return Services(
            limits,
            {service["name"]: _route(service) for service in services},
            tuple(
                ManagedEngine(service["engine_model"], int(service["num_bytes"]), bool(service["pinned"]))
                for service in services
            ),
            raw.get("grpc_url"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{SERVICES_FILE} is damaged ({error!r}); write it again with `enginehouse services apply`."
        raise ConfigurationError(msg) from error


def _route(service: Mapping[str, Any]) -> Route:
    return Route(
        release=service["name"],
        engine_model=service["engine_model"],
        tokenizer_dir=service["tokenizer_dir"],
        engine_dir=service["engine_dir"],
        build_id=service["build_id"],
    )


class ServiceTable:
    """The current services. A file that is wrong leaves the last good one in force; ``last_error`` says why."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._services = NO_SERVICES
        self._seen: tuple[int, int] | None = None
        self._next_check_s = 0.0
        self._lock = threading.Lock()
        self.last_error: str | None = None

    def route(self, service: str) -> Route:
        """Return the route of a service; raise :class:`InvalidRequestError` for an unknown one."""
        routes = self.current().routes
        if service not in routes:
            routes = self._read_now().routes  # it may have been put in force a moment ago
        if service not in routes:
            known = ", ".join(sorted(routes)) or "none"
            hint = f"Services here: {known}."
            raise InvalidRequestError(refusal(SERVICE_PARAMETER, "names no service", given=service, hint=hint))
        return routes[service]

    def current(self) -> Services:
        """Return the services, reading the file again when it changed."""
        with self._lock:
            if (now_s := time.monotonic()) >= self._next_check_s:
                self._next_check_s = now_s + _CHECK_PERIOD_S
                self._refresh()
            return self._services

    def _read_now(self) -> Services:
        with self._lock:
            self._refresh()
            return self._services

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except OSError:
            self._seen, self._services, self.last_error = None, NO_SERVICES, None
            return
        seen = (status.st_mtime_ns, status.st_ino)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._services = parse_services(self._path.read_text(encoding="utf-8"))
            self.last_error = None
        except (OSError, UnicodeDecodeError, ConfigurationError) as error:
            self.last_error = str(error)
