"""Spans of a real server, received by a collector over OTLP."""

from __future__ import annotations

import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.servers import running_server

from enginehouse_backends.front_door.tracing import NoTracer, open_tracer
from enginehouse_client import Client
from enginehouse_contract.errors import ConfigurationError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Collector:
    """An OTLP/HTTP endpoint that keeps every span."""

    def __init__(self) -> None:
        self.spans: queue.Queue[Any] = queue.Queue()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip  # noqa: PLC0415 - seldom

                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            collector.spans.put(span)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)

    def take(self) -> tuple[Any, dict[str, Any]]:
        """Wait for a span; return it and its attributes."""
        span = self.spans.get(timeout=30)
        values = {each.key: each.value for each in span.attributes}
        return span, {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that listens."""
    running = Collector()
    running.thread.start()
    yield running
    running.server.shutdown()
    running.server.server_close()
    running.thread.join()


@pytest.mark.integration
@pytest.mark.model
def test_every_row_is_a_span_with_gen_ai_attributes(smollm2_build: Path, tmp_path: Path, collector: Collector) -> None:
    """Counts, reasons and who asked; a refused one is an error; a `traceparent` header is continued."""
    with running_server(smollm2_build, tmp_path, otlp_endpoint=collector.url) as server:
        with Client(server.grpc_url) as client:
            answer = client.generate("The capital of France is", max_tokens=4, tenant="acme", request_id="traced")
            span, attributes = collector.take()
            with pytest.raises(InvalidRequestError):
                client.generate("x", max_tokens=4, top_p=7.0)
            failed, _ = collector.take()
        with tritonclient.grpc.InferenceServerClient(server.grpc_url) as raw:
            ask_with_parent(raw)
            child, _ = collector.take()

    assert span.name == "text_completion smollm2"
    assert attributes["gen_ai.response.id"] == "traced"
    assert attributes["gen_ai.usage.input_tokens"] == answer.usage.num_input_tokens
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"].values[0].string_value == "length"
    assert attributes["enginehouse.tenant"] == "acme"
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert [event.name for event in span.events] == ["first token"]
    assert failed.status.code == 2
    assert child.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert child.parent_span_id.hex() == "b7ad6b7169203331"


def ask_with_parent(raw: tritonclient.grpc.InferenceServerClient) -> None:
    """Send a request with trace context in its metadata."""
    import numpy as np  # noqa: PLC0415 - only here

    text = tritonclient.grpc.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"hi"]], np.object_))
    limit = tritonclient.grpc.InferInput("max_tokens", [1, 1], "INT32")
    limit.set_data_from_numpy(np.array([[2]], np.int32))
    done: queue.Queue[Any] = queue.Queue()
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    raw.start_stream(lambda result, error: done.put((result, error)), headers=headers)
    raw.async_stream_infer("tensorrt_llm_bls", [text, limit])
    _, error = done.get(timeout=30)
    assert error is None
    raw.stop_stream()


def test_without_the_setting_there_is_no_tracer() -> None:
    """And an address that is none is refused."""
    assert isinstance(open_tracer(""), NoTracer)
    with pytest.raises(ConfigurationError, match="ENGINEHOUSE_OTLP_ENDPOINT"):
        open_tracer("localhost:4317")
