"""The settings every part shares: where state lives. Environment ``ENGINEHOUSE_*``; unknown names are errors.

State lives under one folder, ``ENGINEHOUSE_HOME``: ``store/`` builds, ``repository/`` the live Triton repository,
``cache/`` downloads and scratch, ``logs/``. Deleting it loses nothing but state.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "ENGINEHOUSE_"


@dataclass(frozen=True, slots=True)
class Settings:
    """Folders of this installation; each field is also an environment variable ``ENGINEHOUSE_<FIELD>``."""

    home: Path

    @property
    def store_dir(self) -> Path:
        """Builds, one folder each, named by build id."""
        return self.home / "store"

    @property
    def repository_dir(self) -> Path:
        """The live Triton model repository."""
        return self.home / "repository"

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

    Raises :class:`ConfigurationError` for an unknown ``ENGINEHOUSE_*`` name, with the nearest known one.
    """
    environ = os.environ if environ is None else environ
    known = {_PREFIX + field.name.upper() for field in fields(Settings)}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            msg = f"unknown setting {name}; did you mean {nearest[0]}? Known: {', '.join(sorted(known))}."
            raise ConfigurationError(msg)
    home = environ.get(_PREFIX + "HOME", "")
    return Settings(home=Path(home).expanduser().absolute() if home else _default_home(environ))


def _default_home(environ: Mapping[str, str]) -> Path:
    state = environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state else Path.home() / ".local" / "state") / "enginehouse"
