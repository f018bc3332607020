"""The settings every part shares: where state lives, what is accounted. ``ENGINEHOUSE_*``; unknown names are errors.

State lives under one folder, ``ENGINEHOUSE_HOME``: ``store/`` builds, ``repository/`` the live Triton repository,
``services/`` engines loaded on demand, ``cache/`` downloads and scratch, ``logs/``. Deleting it loses only state.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "ENGINEHOUSE_"
DEFAULT_SERVER_URL = "127.0.0.1:8001"  # Triton's own default port

ChoiceT = TypeVar("ChoiceT", bound=str)


Switch = Literal["on", "off"]
OnLedgerFailure = Literal["refuse", "serve"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an installation says of itself; each field is also an environment variable ``ENGINEHOUSE_<FIELD>``."""

    home: Path
    accounting: Switch = "on"
    ledger_url: str = ""  # sqlite:///path or postgresql://...; empty: ledger.db in the home folder
    on_ledger_failure: OnLedgerFailure = "refuse"  # what becomes of requests while the ledger is away
    bind_address: str = "127.0.0.1"  # where the server listens; 0.0.0.0 in a container
    server_url: str = DEFAULT_SERVER_URL  # gRPC address of the server that a front door runs in
    otlp_endpoint: str = ""  # http://host:4318 of an OpenTelemetry collector; empty: no spans

    def environ(self) -> dict[str, str]:
        """Return the variables that make another process read these settings."""
        return {_PREFIX + field.name.upper(): str(getattr(self, field.name)) for field in fields(self)}

    @property
    def store_dir(self) -> Path:
        """Builds, one folder each, named by build id."""
        return self.home / "store"

    @property
    def repository_dir(self) -> Path:
        """The live Triton model repository."""
        return self.home / "repository"

    @property
    def services_dir(self) -> Path:
        """The engine models of services that are loaded on demand: a second Triton repository."""
        return self.home / "services"

    @property
    def cache_dir(self) -> Path:
        """Downloads and compiled caches; safe to delete."""
        return self.home / "cache"

    @property
    def logs_dir(self) -> Path:
        """Log files of servers and builds."""
        return self.home / "logs"


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from *environ* (default: the process's).

    Raises :class:`ConfigurationError` for an unknown ``ENGINEHOUSE_*`` name, with the nearest known one, and for a
    value that is none of a setting's choices.
    """
    environ = os.environ if environ is None else environ
    known = {_PREFIX + field.name.upper() for field in fields(Settings)}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            msg = f"unknown setting {name}; did you mean {nearest[0]}? Known: {', '.join(sorted(known))}."
            raise ConfigurationError(msg)
    home = environ.get(_PREFIX + "HOME", "")
    return Settings(
        home=Path(home).expanduser().absolute() if home else _default_home(environ),
        accounting=_choice(environ, "ACCOUNTING", "on", get_args(Switch)),
        ledger_url=environ.get(_PREFIX + "LEDGER_URL", ""),
        on_ledger_failure=_choice(environ, "ON_LEDGER_FAILURE", "refuse", get_args(OnLedgerFailure)),
        bind_address=environ.get(_PREFIX + "BIND_ADDRESS", "") or "127.0.0.1",
        server_url=environ.get(_PREFIX + "SERVER_URL", "") or DEFAULT_SERVER_URL,
        otlp_endpoint=environ.get(_PREFIX + "OTLP_ENDPOINT", ""),
    )


def _choice(environ: Mapping[str, str], name: str, default: ChoiceT, choices: tuple[ChoiceT, ...]) -> ChoiceT:
    text = environ.get(_PREFIX + name, "") or default
    for choice in choices:
        if choice == text:
            return choice
    raise ConfigurationError(refusal(_PREFIX + name, f"must be {' or '.join(choices)}", given=text))


def _default_home(environ: Mapping[str, str]) -> Path:
    state = environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "enginehouse"
