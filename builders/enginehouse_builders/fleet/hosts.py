"""Hosts that are reached by running `enginehouse` on them: here, over ssh, or by any command that runs one there.

Written as text (``--server``) or in a YAML file::

    servers:
      - /srv/enginehouse/a                       # a state folder of this host
      - ssh://serving@gpu1/var/lib/enginehouse   # user and state folder as on that host
      - name: pod-0                              # anything that runs a command
        run: [kubectl, exec, enginehouse-0, --]
        home: /var/lib/enginehouse
"""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import yaml

from enginehouse_builders.fleet.rollout import Serving
from enginehouse_builders.remote.location import is_url
from enginehouse_contract.errors import ConfigurationError, EngineUnavailableError, PromotionError, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXIT_UNAVAILABLE: Final = 3  # of `enginehouse`
_EXIT_OF_TRANSPORT: Final = frozenset({126, 127, 255})  # no such command there; ssh could not connect
_ASK_TIMEOUT_S: Final = 60.0
_KEYS: Final = frozenset({"name", "run", "home"})


@dataclass(frozen=True, slots=True)
class CommandHost:
    """A host on which *command* runs `enginehouse` with the arguments that follow."""

    name: str
    command: tuple[str, ...]
    timeout_s: float = 3600.0
    is_shell: bool = False  # the arguments pass through a shell there, as with ssh

    def serving(self) -> Serving:
        """Return what is in production there."""
        shown = self._run(["stage", "show", "production", "--json"], _ASK_TIMEOUT_S)
        row = shown.get("production")
        return Serving("", "") if row is None else _serving(row)

    def promote(self, build: str, options: Sequence[str] = (), *, with_gates: bool = False) -> Serving:
        """Pull the build there where *build* is a URL, run its gates where asked, and promote it."""
        if is_url(build):
            url, _, name = build.rstrip("/").rpartition("/")
            build = str(self._run(["builds", "pull", url, name, "--json"], self.timeout_s)["build_id"])
        if with_gates:
            self._run(["gate", build, "--json"], self.timeout_s)
        return _serving(self._run(["promote", build, *options, "--json"], self.timeout_s))

    def rollback(self, options: Sequence[str] = ()) -> Serving:
        """Go back to the release before."""
        return _serving(self._run(["rollback", *options, "--json"], self.timeout_s))

    def _run(self, arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
        words = [shlex.quote(word) for word in arguments] if self.is_shell else list(arguments)
        try:
            done = subprocess.run(  # noqa: S603 - the operator's own command, no shell here
                [*self.command, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except OSError as error:
            raise EngineUnavailableError(f"`{self.command[0]}` cannot be run ({error.strerror or error}).") from error
        except subprocess.TimeoutExpired as error:
            raise EngineUnavailableError(f"no answer to `enginehouse {arguments[0]}` in {timeout_s:g} s.") from error
        if done.returncode == 0:
            return _parse(done.stdout, arguments[0])
        words_of_it = done.stderr.strip().splitlines()
        reason = words_of_it[-1].removeprefix("error: ") if words_of_it else f"exit status {done.returncode}"
        if done.returncode in {_EXIT_UNAVAILABLE, *_EXIT_OF_TRANSPORT}:
            raise EngineUnavailableError(reason)
        raise PromotionError(reason)


def parse_host(text: str, local_command: Sequence[str]) -> CommandHost:
    """Read ``--server``: a state folder of this host, or ``ssh://[user@]host[:port][/state/folder]``.

    *local_command* runs `enginehouse` on this host. Raises :class:`ConfigurationError` for anything else.
    """
    if not is_url(text):
        home = Path(text).expanduser().absolute()
        if not home.is_dir():
            hint = "Give a state folder (ENGINEHOUSE_HOME), or ssh://host."
            raise ConfigurationError(refusal("--server", "is no folder of this host", given=text, hint=hint))
        return CommandHost(str(home), ("env", f"ENGINEHOUSE_HOME={home}", *local_command))
    parts = urlsplit(text)
    try:
        port = () if parts.port is None else ("-p", str(parts.port))
    except ValueError as error:
        raise ConfigurationError(refusal("--server", f"has a bad port ({error})", given=text)) from error
    if parts.scheme != "ssh" or not parts.hostname or parts.hostname.startswith("-"):
        raise ConfigurationError(refusal("--server", "must be a folder or ssh://host", given=text))
    target = parts.hostname if parts.username is None else f"{parts.username}@{parts.hostname}"
    home_setting = ("env", shlex.quote(f"ENGINEHOUSE_HOME={parts.path}")) if parts.path.strip("/") else ()
    command = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *port, "--", target, *home_setting)
    return CommandHost(target, (*command, "enginehouse"), is_shell=True)


def read_hosts(file: Path, local_command: Sequence[str]) -> list[CommandHost]:
    """Read a file of servers; raise :class:`ConfigurationError` naming the entry that is wrong."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not YAML: {' '.join(str(error).split())}.") from error
    entries = content.get("servers") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError(f"{file} must hold a list `servers` with at least one entry.")
    return [_host_of(entry, f"{file}: server {index}", local_command) for index, entry in enumerate(entries)]


def _host_of(entry: object, where: str, local_command: Sequence[str]) -> CommandHost:
    if isinstance(entry, str):
        return parse_host(entry, local_command)
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigurationError(f"{where} must be text, or have a `name` and `run`.")
    if unknown := sorted(map(str, set(entry) - _KEYS)):
        raise ConfigurationError(f"{where} has unknown keys: {', '.join(unknown)}.")
    run = entry.get("run", [])
    if not isinstance(run, list) or not all(isinstance(word, str) for word in run):
        raise ConfigurationError(f"{where}: `run` must be a list of words.")
    home = ("env", f"ENGINEHOUSE_HOME={entry['home']}") if entry.get("home") else ()
    return CommandHost(entry["name"], (*run, *home, *(["enginehouse"] if run else local_command)))


def _serving(row: dict[str, Any]) -> Serving:
    return Serving(str(row.get("release", "")), str(row.get("build_id", "")))


def _parse(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PromotionError(f"`enginehouse {what} --json` there answered no JSON object; is it of the same version?")
    return value
