"""The one place where our Triton models touch the server.

Triton 2.51 can be crashed or wedged from Python; every rule that prevents it lives here, so that no model has to know:

- ``is_cancelled()`` at or after the final response is a segmentation fault of the server: one lock per request covers
  both, and a closed stream never asks again.
- An error sent apart from its FINAL flag crashes the server under gRPC metadata that any client can set: errors and
  FINAL always travel together.
- Sending a tensor nobody requested is pruned without the GIL: only requested outputs are sent.
- A metric call that raises (a negative increment) aborts the server: values are checked before the call. One that
  overlaps with any other call can stop the process for ever: :data:`SERVER_CALLS` keeps them apart.
- A metric family must outlive its metrics: the registry holds both.

What it does not cover: what the tensors mean (`engine_request.py`, `preprocessing.py`, ...).
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from enginehouse_contract.errors import EnginehouseError, InvalidRequestError, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from enginehouse_contract.tensors import Tensor

NUMPY_TYPES: dict[str, type[Any]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "STRING": np.object_,
}


def _server() -> Any:
    """Return ``triton_python_backend_utils``, which exists only inside a Triton stub process."""
    return importlib.import_module("triton_python_backend_utils")


def route_logging_to_server() -> None:
    """Send Python's logging of this process to Triton's own log."""
    root = logging.getLogger()
    if not any(isinstance(handler, _ServerLogHandler) for handler in root.handlers):
        root.addHandler(_ServerLogHandler())
        root.setLevel(logging.INFO)


class _ServerLogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logger = _server().Logger
        write = logger.log_error if record.levelno >= logging.ERROR else logger.log_info
        write(self.format(record))


def read_inputs(request: Any, tensors: Iterable[Tensor]) -> dict[str, NDArray[Any]]:
    """Return the given inputs that *request* carries, by name, with their batch dimension.

    Raises :class:`InvalidRequestError` when a required one is missing (the server counts inputs instead of checking
    names, so a request may arrive without one).
    """
    get = _server().get_input_tensor_by_name
    inputs: dict[str, NDArray[Any]] = {}
    for tensor in tensors:
        found = get(request, tensor.name)
        if found is not None:
            inputs[tensor.name] = found.as_numpy()
        elif not tensor.optional:
            raise InvalidRequestError(refusal(tensor.name, "is required and was not sent"))
    return inputs


def read_parameters(request: Any) -> dict[str, Any]:
    """Return the request's parameters (JSON object of str, int, bool and, over HTTP, float)."""
    text = request.parameters()
    parameters = json.loads(text) if text else {}
    return parameters if isinstance(parameters, dict) else {}


def make_response(outputs: Mapping[str, NDArray[Any]], requested: Iterable[str]) -> Any:
    """Make an InferenceResponse of those *outputs* that were *requested*."""
    server = _server()
    wanted = set(requested)
    return server.InferenceResponse([server.Tensor(name, value) for name, value in outputs.items() if name in wanted])


def make_error_response(error: BaseException) -> Any:
    """Make an InferenceResponse that carries *error* under its Triton code and never a traceback."""
    server = _server()
    return server.InferenceResponse(output_tensors=[], error=_triton_error(error))


def _triton_error(error: BaseException) -> Any:
    server = _server()
    if isinstance(error, EnginehouseError):
        code = getattr(server.TritonError, error.code, server.TritonError.INTERNAL)
        return server.TritonError(str(error), code)
    logging.getLogger(__name__).error("unexpected error in a Triton model", exc_info=error)
    text = f"internal error ({type(error).__name__}); the server's log has the details."
    return server.TritonError(text, server.TritonError.INTERNAL)


_SWITCH_INTERVAL_S: Final = 0.0005


def let_threads_take_turns() -> None:
    """Let Python's threads change places often: each does a little, and no token should wait for others."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


class _ServerCalls:
    """Which calls of this process to its server may overlap.

    On Triton 2.51 a metric call keeps the GIL while it waits for the server. A thread that is in another call meanwhile
    cannot take the server's answer, for which the server waits: nothing of the process moves again. Two metric calls at
    once overwrite each other's message and crash the server. So metric calls are made alone, all others together.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_together = 0
        self._num_waiting_alone = 0
        self._is_alone = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make a call that may overlap with others."""
        with self._changed:
            while self._is_alone or self._num_waiting_alone:
                self._changed.wait()
            self._num_together += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_together -= 1
                if not self._num_together:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make a call while no other is made."""
        with self._changed:
            self._num_waiting_alone += 1
            while self._is_alone or self._num_together:
                self._changed.wait()
            self._num_waiting_alone -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()


SERVER_CALLS: Final = _ServerCalls()


class ResponseStream:
    """The responses of one request: any number of data responses, then exactly one FINAL.

    Thread-safe. After the final response every call is a no-op: a late token of a cancelled request is harmless. The
    sender is let go with it: the server does not unload a model while one of its senders is alive, and whatever still
    holds this stream (the traceback of an error, say) may be freed late.
    """

    def __init__(self, request: Any) -> None:
        self.request_id: str = request.request_id()
        self.requested_outputs: frozenset[str] = frozenset(request.requested_output_names())
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """Whether the final response was sent."""
        return self._sender is None

    def is_cancelled(self) -> bool:
        """Return whether the client has left; False once the stream is closed."""
        with self._lock:
            if self._sender is None:
                return False
            with SERVER_CALLS.together():
                return bool(self._sender.is_cancelled())

    def send(self, outputs: Mapping[str, NDArray[Any]], *, final: bool = False) -> None:
        """Send one response; with *final* also end the stream."""
        with self._lock:
            if self._sender is not None:
                self._send(make_response(outputs, self.requested_outputs), final=final)

    def fail(self, error: BaseException) -> None:
        """End the stream with *error*, in one response."""
        with self._lock:
            if self._sender is not None:
                self._send(make_error_response(error), final=True)

    def close(self) -> None:
        """End the stream with an empty final response."""
        with self._lock:
            if self._sender is not None:
                self._send(None, final=True)

    def _send(self, response: Any, *, final: bool) -> None:
        sender = self._sender
        if final:
            self._sender = None
        flags = _server().TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with SERVER_CALLS.together():
            if response is None:
                sender.send(flags=flags)
            else:
                sender.send(response, flags=flags)


MetricKind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]


class MetricRegistry:
    """Prometheus metrics of this process, created on first use and kept as long as the registry. Thread-safe.

    Each call costs the server 20 to 100 microseconds: report per request or per period, never per token.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._gauge_values: dict[int, float] = {}

    def set_gauge(self, name: str, description: str, value: float, **labels: str) -> None:
        """Set a gauge; an unchanged value costs nothing."""
        with SERVER_CALLS.alone():
            metric = self._metric("GAUGE", name, description, labels)
            if math.isfinite(value) and self._gauge_values.get(id(metric)) != value:
                self._gauge_values[id(metric)] = value
                metric.set(float(value))

    def increment(self, name: str, description: str, amount: float, **labels: str) -> None:
        """Add a positive amount to a counter; zero creates the series, anything else is ignored."""
        with SERVER_CALLS.alone():
            metric = self._metric("COUNTER", name, description, labels)
            if math.isfinite(amount) and amount > 0:
                metric.increment(float(amount))

    def observe(self, name: str, description: str, value: float, buckets: Sequence[float], **labels: str) -> None:
        """Add one observation to a histogram with the given upper bounds."""
        with SERVER_CALLS.alone():
            metric = self._metric("HISTOGRAM", name, description, labels, buckets)
            if math.isfinite(value):
                metric.observe(float(value))

    def _metric(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        labels: Mapping[str, str],
        buckets: Sequence[float] | None = None,
    ) -> Any:
        key = (name, tuple(sorted(labels.items())))
        metric = self._metrics.get(key)
        if metric is None:
            server = _server()
            family = self._families.get(name)
            if family is None:
                family = server.MetricFamily(
                    name=name, description=description, kind=getattr(server.MetricFamily, kind)
                )
                self._families[name] = family
            every_label = {**self._labels, **labels}
            metric = (
                family.Metric(labels=every_label)
                if buckets is None
                else family.Metric(labels=every_label, buckets=[float(bound) for bound in buckets])
            )
            self._metrics[key] = metric
        return metric
