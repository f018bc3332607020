"""Starting, watching and stopping one tritonserver on this host.

The server and the stubs it starts form one process group; stopping ends the group and removes its shared memory, also
after a crash. If this process dies, the kernel tells the server to stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from enginehouse_backends.server.binary import SHARED_MEMORY_DIR, find_libpython, require_host
from enginehouse_backends.server.repository import assemble_backends
from enginehouse_backends.server.server_log import failure_in_log
from enginehouse_contract.errors import ServerStartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from enginehouse_contract.settings import Settings

HOST: Final = "127.0.0.1"
STATE_FILE: Final = "server.json"

_POLL_S: Final = 0.05
_STOP_GRACE_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a running server wrote into the state folder, for clients and for a second start."""

    pid: int
    grpc_port: int
    http_port: int
    metrics_port: int
    build_id: str
    log_file: str

    @property
    def grpc_url(self) -> str:
        """Address for gRPC clients."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def http_url(self) -> str:
        """Address for HTTP clients."""
        return f"http://{HOST}:{self.http_port}"


def read_state(home: Path) -> ServerState | None:
    """Return the state of the server that runs on *home*, or None; a stale file of a dead one counts as none."""
    try:
        raw: dict[str, Any] = json.loads((home / STATE_FILE).read_text(encoding="utf-8"))
        state = ServerState(**raw)
    except (OSError, ValueError, TypeError):
        return None
    return state if _is_tritonserver(state.pid) else None


def write_state(home: Path, state: ServerState) -> None:
    """Write the state file, whole or not at all."""
    fresh = home / f".{STATE_FILE}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(state)), encoding="utf-8")
    fresh.replace(home / STATE_FILE)


def is_server_of(state: ServerState, repository: Path) -> bool:
    """Return whether the process of *state* is a server of *repository* on the recorded port."""
    arguments = _command_line(state.pid)
    return f"--model-repository={repository}" in arguments and f"--grpc-port={state.grpc_port}" in arguments


def refuse_second_server(home: Path) -> None:
    """Raise :class:`ServerStartError` when a server runs on *home*."""
    if (running := read_state(home)) is not None:
        msg = f"a server already runs on {home} (pid {running.pid}, gRPC port {running.grpc_port}); stop it first."
        raise ServerStartError(msg)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to start; a port of 0 means any free one."""

    repository: Path
    build_id: str = ""
    models: Sequence[str] = ("*",)
    grpc_port: int = 0
    http_port: int = 0
    metrics_port: int = 0
    tenant_header_pattern: str = "(?i)x-tenant-id|x-enginehouse-(tenant|key)|traceparent"
    ready_timeout_s: float = 120.0


class TritonServer:
    """One running tritonserver; a context manager that stops it."""

    def __init__(self, settings: Settings, options: ServerOptions) -> None:
        self._settings = settings
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._shared_memory_prefix = f"enginehouse_{os.getpid()}_{secrets.token_hex(4)}_"
        self.state: ServerState | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, progress: Callable[[str], None] | None = None) -> ServerState:
        """Start and wait until every model answers.

        Raises :class:`ServerStartError` when something that serving needs is missing, a port is taken, another server
        runs on this state folder, or a model does not load; the message says what to do, and nothing keeps running.
        """
        home = self._settings.home
        refuse_second_server(home)
        installation = require_host()
        ports = self._choose_ports()
        log_file = self._settings.logs_dir / f"server-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._settings.services_dir.mkdir(parents=True, exist_ok=True)
        backend_dir = self._settings.cache_dir / "backends"
        assemble_backends(backend_dir, installation, _import_paths())
        state = ServerState(0, *ports, build_id=self._options.build_id, log_file=str(log_file))
        command = [str(installation.binary), *self._flags(state, backend_dir)]
        own = replace(self._settings, server_url=state.grpc_url)
        environment = {**_environment(installation.library_dirs), **own.environ()}
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - a single prctl call
            )
        self.state = ServerState(self._process.pid, *ports, build_id=self._options.build_id, log_file=str(log_file))
        try:
            self._wait_until_ready(progress)
        except BaseException:
            self.stop()
            raise
        write_state(home, self.state)
        return self.state

    def wait(self) -> int:
        """Wait until the server ends by itself and return its exit status."""
        assert self._process is not None, "the server was started"
        return self._process.wait()

    def stop(self) -> None:
        """Stop the server and its stubs: asked first, then killed; remove their shared memory and the state file."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_GRACE_S)
        # The group outlives its leader when a stub was orphaned by a crash.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for region in SHARED_MEMORY_DIR.glob(f"{self._shared_memory_prefix}*"):
            region.unlink(missing_ok=True)
        (self._settings.home / STATE_FILE).unlink(missing_ok=True)

    def _choose_ports(self) -> tuple[int, int, int]:
        chosen: list[int] = []
        options, address = self._options, self._settings.bind_address
        wanted = (("gRPC", options.grpc_port), ("HTTP", options.http_port), ("metrics", options.metrics_port))
        with contextlib.ExitStack() as stack:
            for name, port in wanted:
                probe = stack.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address, port))
                except OSError as error:
                    where = f"the {name} port {port} on {address}"
                    msg = f"{where} is taken ({error.strerror}); choose another, or 0 for any."
                    raise ServerStartError(msg) from error
                chosen.append(probe.getsockname()[1])
        return chosen[0], chosen[1], chosen[2]

    def _flags(self, state: ServerState, backend_dir: Path) -> list[str]:
        flags = [
            f"--model-repository={self._options.repository}",
            f"--model-repository={self._settings.services_dir}",
            f"--backend-directory={backend_dir}",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in self._options.models),
            "--disable-auto-complete-config",
            "--strict-readiness=false",
            f"--exit-timeout-secs={_STOP_GRACE_S - 2:.0f}",
            f"--http-address={self._settings.bind_address}",
            f"--grpc-address={self._settings.bind_address}",
            f"--metrics-address={self._settings.bind_address}",
            f"--http-port={state.http_port}",
            f"--grpc-port={state.grpc_port}",
            f"--metrics-port={state.metrics_port}",
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory_prefix}",
            "--backend-config=python,shm-default-byte-size=4194304",
            "--model-load-thread-count=4",
        ]
        if self._options.tenant_header_pattern:
            pattern = self._options.tenant_header_pattern
            flags += [f"--http-header-forward-pattern={pattern}", f"--grpc-header-forward-pattern={pattern}"]
        return flags

    def _wait_until_ready(self, progress: Callable[[str], None] | None) -> None:
        assert self._process is not None, "the process was started"
        assert self.state is not None, "its state is known"
        deadline_s = time.monotonic() + self._options.ready_timeout_s
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise ServerStartError(
                    self._explain_failure(f"tritonserver ended with status {self._process.returncode}")
                )
            if _answers(f"{self.state.http_url}/v2/health/ready"):
                return
            if progress is not None:
                progress("loading models")
            time.sleep(_POLL_S)
        raise ServerStartError(self._explain_failure(f"not ready after {self._options.ready_timeout_s:g} s"))

    def _explain_failure(self, what: str) -> str:
        """Say what happened with the server's own words about the first model that failed."""
        assert self.state is not None, "its log is known"
        reason = failure_in_log(self.state.log_file)
        details = f": {reason.rstrip('.')}" if reason else ""
        return f"{what}{details}. The log is {self.state.log_file}."


def _environment(library_dirs: Sequence[Path]) -> dict[str, str]:
    environment = dict(os.environ)
    libraries = [str(folder) for folder in library_dirs]
    libpython = find_libpython()
    if libpython is not None and str(libpython) != ".":
        libraries.append(str(libpython))
    if environment.get("LD_LIBRARY_PATH"):
        libraries.append(environment["LD_LIBRARY_PATH"])
    environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    return environment


def _import_paths() -> list[str]:
    """This environment's site-packages and the folders of an editable install, as ``sys.path`` has them."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("DESTSHARED")}
    return [path for path in sys.path if path and path not in standard and not path.endswith(".zip")]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_tritonserver(pid: int) -> bool:
    return _command_line(pid)[0].rsplit("/", maxsplit=1)[-1].startswith("tritonserver")


def _command_line(pid: int) -> list[str]:
    """Return a process's command line; one empty word for a process that is gone, or dead and not waited for."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as command:  # noqa: PTH123
            return command.read().split("\0")
    except OSError:
        return [""]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310 - our own server on 127.0.0.1
            return bool(response.status == 200)  # noqa: PLR2004 - HTTP's OK
    except (urllib.error.URLError, OSError):
        return False
