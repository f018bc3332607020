"""Real gRPC and HTTP servers on this host that answer every generation by a script, for tests of the client."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GUARD_S = 20.0  # a test that hangs fails by then
NUM_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Text:
    """Answer a piece of text, with the final flag or without."""

    text: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Final:
    """End with an empty final response."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Answer an error; over HTTP with this status where it comes first."""

    message: str
    status: int = 400


@dataclass(frozen=True, slots=True)
class WaitUntilClientLeaves:
    """Say nothing until the client has left."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Break the connection."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Say nothing for a while."""

    seconds: float


Step = Text | Final | Failure | WaitUntilClientLeaves | Drop | Pause


@dataclass(eq=False, slots=True)
class ScriptedServer:
    """What a server of this module was asked and saw."""

    script: Sequence[Step]
    url: str = ""
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    client_left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def scripted_server(protocol: str, script: Sequence[Step], port: int = 0) -> Iterator[ScriptedServer]:
    """Run a server of *protocol* (grpc or http) that follows *script*, on any free port unless one is given."""
    server = ScriptedServer(script)
    with _grpc_server(server, port) if protocol == "grpc" else _http_server(server, port):
        yield server


@contextmanager
def _grpc_server(scripted: ScriptedServer, port: int) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(max_workers=NUM_WORKERS))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(scripted), server)
    scripted.url = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, scripted: ScriptedServer) -> None:
        self._scripted = scripted

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return service_pb2.ModelReadyResponse(ready=request.name == "ensemble")

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name="ensemble", version="1", state="READY")
        answer.models.add(name="old", version="1", state="UNAVAILABLE", reason="unloaded")
        return answer

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802 - gRPC's name
        self._scripted.requests.append(next(request_iterator))
        self._scripted.asked.set()
        self._scripted.metadata.append(dict(context.invocation_metadata()))
        ended, is_complete = threading.Event(), threading.Event()

        def end() -> None:  # gRPC does not resume a handler whose call is over, so this is where it shows
            if not is_complete.is_set():
                self._scripted.client_left.set()
            ended.set()

        context.add_callback(end)
        for step in self._scripted.script:
            if isinstance(step, WaitUntilClientLeaves):
                ended.wait(GUARD_S)
                return
            if isinstance(step, Drop):
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            elif isinstance(step, Pause):
                time.sleep(step.seconds)
            else:
                yield _grpc_response(step)
        is_complete.set()


def _grpc_response(step: Text | Final | Failure) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    if isinstance(step, Failure):
        response.error_message = step.message
        return response
    inner = response.infer_response
    inner.parameters["triton_final_response"].bool_param = isinstance(step, Final) or step.is_final
    if isinstance(step, Text):
        inner.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
        raw = serialize_byte_tensor(np.array([step.text.encode()], np.object_)).item()
        inner.raw_output_contents.append(raw)
    return response


@contextmanager
def _http_server(scripted: ScriptedServer, port: int) -> Iterator[None]:
    class Handler(_Handler):
        server_script = scripted

    server = _QuietServer(("127.0.0.1", port), Handler)
    scripted.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep quiet: clients that leave are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_script: ScriptedServer

    def log_message(self, *arguments: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        """Answer readiness."""
        is_ready = self.path in {"/v2/health/ready", "/v2/models/ensemble/ready"}
        self._send(200 if is_ready else 400, b"")

    def do_POST(self) -> None:
        """Answer the index of models, or follow the script."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/v2/repository/index":
            models = [
                {"name": "ensemble", "version": "1", "state": "READY"},
                {"name": "old", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
            ]
            self._send(200, json.dumps(models).encode())
            return
        self.server_script.requests.append(json.loads(body))
        self.server_script.asked.set()
        self.server_script.metadata.append({name.lower(): value for name, value in self.headers.items()})
        if self.path.endswith("/generate"):
            self._answer_once()
        else:
            self._stream()

    def _answer_once(self) -> None:
        for step in self.server_script.script:
            if isinstance(step, Text):
                self._send(200, json.dumps({"text_output": step.text}).encode())
            elif isinstance(step, Failure):
                self._send(step.status, json.dumps({"error": step.message}).encode())
            elif self._misbehave(step):
                return

    def _stream(self) -> None:
        has_begun = False
        for step in self.server_script.script:
            if isinstance(step, Failure) and not has_begun:
                self._send(step.status, json.dumps({"error": step.message}).encode())
                return
            if not has_begun:
                has_begun = True
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            if isinstance(step, Text):
                self._send_chunk({"text_output": step.text})
            elif isinstance(step, Failure):
                self._send_chunk({"error": step.message})
            elif self._misbehave(step):
                return
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_chunk(self, answer: dict[str, str]) -> None:
        event = f"data: {json.dumps(answer)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()

    def _misbehave(self, step: Step) -> bool:
        """Follow a step that says nothing; return whether the connection is over."""
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return False
        if isinstance(step, WaitUntilClientLeaves):
            self.connection.settimeout(GUARD_S)
            if self.connection.recv(1) == b"":
                self.server_script.client_left.set()
        self.close_connection = isinstance(step, (WaitUntilClientLeaves, Drop))
        return self.close_connection
