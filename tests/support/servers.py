"""A real tritonserver for tests, on free ports and in a state folder of its own."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse_backends.server.repository import render_repository
from enginehouse_backends.server.supervisor import ServerOptions, ServerState, TritonServer
from enginehouse_contract.manifest import read_manifest
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    state: ServerState
    settings: Settings
    server: TritonServer

    @property
    def grpc_url(self) -> str:
        """Address for gRPC clients."""
        return self.state.grpc_url

    @property
    def http_url(self) -> str:
        """Address for HTTP clients."""
        return self.state.http_url


@contextmanager
def running_server(
    build_dir: Path, home: Path, parameters: Mapping[str, str] | None = None, **values: Any
) -> Iterator[RunningServer]:
    """Serve a build with these settings of the installation; stopped at the end of the block."""
    settings = Settings(home=home, **values)
    render_repository(settings.repository_dir, build_dir, parameters)
    options = ServerOptions(settings.repository_dir, build_id=read_manifest(build_dir).build_id)
    with TritonServer(settings, options) as server:
        assert server.state is not None
        yield RunningServer(server.state, settings, server)


@contextmanager
def instant_server(
    build_dir: Path, home: Path, parameters: Mapping[str, str] | None = None, *, ledger_url: str = ""
) -> Iterator[RunningServer]:
    """Serve a build with the instant engine in the engine's place: all is real but the forward pass."""
    settings = Settings(home=home, ledger_url=ledger_url)
    render_repository(settings.repository_dir, build_dir, parameters)
    engine_dir = settings.repository_dir / "tensorrt_llm"
    config = engine_dir / "config.pbtxt"
    config.write_text(config.read_text().replace('backend: "tensorrtllm"', 'backend: "python"'))
    (engine_dir / "1" / "model.py").write_text(
        "from enginehouse_backends import triton  # makes this environment importable\n"
        "from tests.support.instant_engine import TritonPythonModel\n\n__all__ = ['TritonPythonModel', 'triton']\n"
    )
    with TritonServer(settings, ServerOptions(settings.repository_dir)) as server:
        assert server.state is not None
        yield RunningServer(server.state, settings, server)
