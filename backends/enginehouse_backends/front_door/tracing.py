"""One OpenTelemetry span for each row, with the `gen_ai.*` attributes of its semantic conventions; off unless set.

The spans go to the OTLP/HTTP endpoint of the setting ``ENGINEHOUSE_OTLP_ENDPOINT``, in batches, behind the answers. A
request that comes with a `traceparent` header continues its caller's trace.
"""

from __future__ import annotations

import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Protocol

from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.money import PICO_PER_UNIT

if TYPE_CHECKING:
    from enginehouse_backends.front_door.door import Job

_NS_PER_S: Final = 10**9
_UJ_PER_J: Final = 1e6
_FAILURES: Final = frozenset({"error", "timeout"})


class JobTracer(Protocol):
    """Hears of every job's end."""

    def report_job(self, job: Job) -> None:
        """Record one ended row."""
        ...

    def close(self) -> None:
        """Send what waits."""
        ...


class NoTracer:
    """Tracing is off."""

    def report_job(self, job: Job) -> None:
        """Ignore."""

    def close(self) -> None:
        """Nothing waits."""


class OtlpTracer:
    """Sends spans by OTLP over HTTP."""

    def __init__(self, provider: Any, propagator: Any, kind: Any, error_status: Any) -> None:
        self._provider = provider
        self._propagator = propagator
        self._kind = kind
        self._error_status = error_status
        self._tracer = provider.get_tracer("enginehouse")

    def report_job(self, job: Job) -> None:
        """See :class:`JobTracer`."""
        ended_ns = time.time_ns()
        started_ns = ended_ns - int((time.monotonic() - job.accepted_s) * _NS_PER_S)
        operation = "text_completion" if job.row.messages is None else "chat"
        parent = job.row.trace_parent
        span = self._tracer.start_span(
            f"{operation} {job.model_name}",
            context=self._propagator.extract({"traceparent": parent}) if parent else None,
            kind=self._kind,
            attributes={"gen_ai.operation.name": operation, **attributes_of(job)},
            start_time=started_ns,
        )
        if job.first_token_s is not None:
            span.add_event("first token", timestamp=started_ns + int((job.first_token_s - job.accepted_s) * _NS_PER_S))
        if job.finish_reason in _FAILURES:
            span.set_status(self._error_status)
        span.end(ended_ns)

    def close(self) -> None:
        """See :class:`JobTracer`."""
        self._provider.shutdown()


def open_tracer(endpoint: str) -> JobTracer:
    """Return the tracer of an OTLP/HTTP *endpoint* such as ``http://localhost:4318``; "" is none.

    Raises:
        ConfigurationError: It is no address, or OpenTelemetry is not installed.
    """
    if not endpoint:
        return NoTracer()
    if not endpoint.startswith(("http://", "https://")):
        problem = "must be the address of an OTLP/HTTP collector, such as http://localhost:4318"
        raise ConfigurationError(refusal("ENGINEHOUSE_OTLP_ENDPOINT", problem, given=endpoint))
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - optional
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            f"ENGINEHOUSE_OTLP_ENDPOINT is set, but OpenTelemetry is not installed ({error}); "
            'install "enginehouse[otel]" or unset it.'
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "enginehouse"}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtlpTracer(provider, TraceContextTextMapPropagator(), SpanKind.SERVER, Status(StatusCode.ERROR))


def attributes_of(job: Job) -> dict[str, str | int | float | tuple[str, ...]]:
    """Return what a span says of a row; names of OpenTelemetry's GenAI conventions, and ours beyond them."""
    usage, share, record = job.usage.tokens(), job.usage.share(), job.record
    attributes: dict[str, str | int | float | tuple[str, ...]] = {
        "gen_ai.provider.name": "enginehouse",
        "gen_ai.request.model": job.model_name,
        "gen_ai.response.model": job.model_name,
        "gen_ai.response.id": job.request.request_id,
        "gen_ai.request.max_tokens": job.row.max_tokens,
        "gen_ai.request.choice.count": job.row.num_sequences,
        "gen_ai.response.finish_reasons": (job.finish_reason or "error",),
        "gen_ai.usage.input_tokens": usage.num_input_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_input_cached_tokens,
        "gen_ai.usage.output_tokens": usage.num_output_tokens,
        "enginehouse.tenant": job.row.tenant,
        "enginehouse.release": job.route.release,
        "enginehouse.build_id": job.route.build_id,
    }
    if record is not None and record.amount is not None:
        attributes["enginehouse.cost"] = str(Decimal(record.amount) / PICO_PER_UNIT)
        attributes["enginehouse.currency"] = record.currency or ""
    if share is not None and job.usage.tells_energy:
        attributes["enginehouse.energy_joules"] = share.energy_uj / _UJ_PER_J
    return attributes
