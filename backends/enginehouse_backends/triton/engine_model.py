"""The Triton model behind ``backend: "tensorrtllm"`` on a CPU host: tensors in, the engine, tensors out.

``execute`` returns at once; responses are sent from the engine's delivery thread, through the fence. A watcher thread
looks for clients that left, reports metrics, and answers for an engine that died.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from enginehouse_backends.accounting.setup import open_energy, open_machine_time
from enginehouse_backends.engine.engine import Engine
from enginehouse_backends.engine.request import FinishReason
from enginehouse_backends.engine.runner import OpenVinoRunner
from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_backends.triton import fence
from enginehouse_backends.triton.engine_metrics import EngineMetrics
from enginehouse_backends.triton.engine_request import RequestLimits, is_stop_request, parse_engine_request
from enginehouse_backends.triton.engine_response import SequenceResponder
from enginehouse_backends.triton.engine_settings import read_engine_dir, read_engine_settings
from enginehouse_backends.triton.model_parameters import ModelParameters
from enginehouse_contract.errors import (
    ConfigurationError,
    EngineFailureError,
    EnginehouseError,
    InvalidRequestError,
    RequestCancelledError,
    UnsupportedFeatureError,
    refusal,
)
from enginehouse_contract.manifest import verify_build
from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS
from enginehouse_contract.settings import load_settings
from enginehouse_contract.tensors import TENSORRT_LLM

if TYPE_CHECKING:
    from enginehouse_backends.engine.request import RequestId, SequenceOutput
    from enginehouse_backends.triton.engine_request import EngineRow

_LOGGER = logging.getLogger(__name__)


class TritonPythonModel:
    """Serves the official ``tensorrt_llm`` contract with the embedded engine. One instance holds the one engine."""

    def initialize(self, args: dict[str, str]) -> None:
        """Check the build and the parameters, load the engine, and start the watcher."""
        fence.route_logging_to_server()
        fence.let_threads_take_turns()
        config = json.loads(args["model_config"])
        parameters = ModelParameters.from_model_config(args["model_config"])
        parameters.check_names((*TENSORRT_LLM.parameters, *ENGINEHOUSE_PARAMETERS))
        build_dir = read_engine_dir(parameters)
        manifest = verify_build(build_dir, digests=False)
        if manifest.target != "cpu":
            msg = refusal(
                "gpt_model_path",
                "holds a build for another target than this host's engine",
                limit="cpu",
                given=manifest.target,
            )
            raise ConfigurationError(msg)
        settings = read_engine_settings(parameters, manifest.limits)
        self._is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        self._vocabulary = load_tokenizer(build_dir).vocabulary
        runner = OpenVinoRunner.load(
            build_dir,
            kv_memory_bytes=settings.kv_memory_bytes,
            max_kv_tokens=settings.max_kv_tokens,
            kv_precision=manifest.kv_precision,
            num_threads=settings.num_threads,
            execution_mode=settings.execution_mode,
        )
        installation = load_settings()
        energy = open_energy(installation, settings.declared_power)
        self._machine_time = open_machine_time(installation, energy)
        self._engine = Engine(runner, self._vocabulary, settings.engine, energy)
        self._limits = RequestLimits(
            vocab_size=runner.vocab_size,
            max_input_len=manifest.limits.max_input_len,
            max_seq_len=manifest.limits.max_seq_len,
            max_batch_size=max(1, int(config.get("max_batch_size", 0))),
            exclude_input_in_output=settings.exclude_input_in_output,
        )
        registry = fence.MetricRegistry({"model": args["model_name"], "version": args["model_version"]})
        self._metrics = EngineMetrics(
            registry,
            max_requests=manifest.limits.max_batch_size,
            memory_bytes=runner.num_blocks * runner.bytes_per_block,
        )
        self._in_flight = _InFlight()
        self._settings = settings
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="engine-watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """Start every request; answers come from the engine's delivery thread."""
        for request in requests:
            stream = fence.ResponseStream(request)
            try:
                self._start(request, stream)
            except Exception as error:  # noqa: BLE001 - every request must be answered, whatever went wrong
                stream.fail(error)

    def finalize(self) -> None:
        """Cancel what is in flight and end the engine's threads."""
        self._stopping.set()
        self._watcher.join()
        self._engine.close()
        if self._machine_time is not None:
            self._machine_time.close()

    def _start(self, request: Any, stream: fence.ResponseStream) -> None:
        inputs = fence.read_inputs(request, TENSORRT_LLM.inputs)
        if is_stop_request(inputs):
            self._stop(stream)
            return
        rows = parse_engine_request(
            inputs,
            fence.read_parameters(request),
            self._limits,
            request_id=f"{stream.request_id}#{id(stream):x}",
            arrival_time_ns=time.monotonic_ns(),
        )
        if not self._is_decoupled:
            _check_not_decoupled(rows)
        responses = _RequestResponses(stream, rows, self)
        self._in_flight.add(responses)
        try:
            for row in rows:
                self._engine.submit(row.generation, responses.on_output, stream=row.report.streaming)
        except EnginehouseError:
            self._in_flight.remove(responses)
            self._cancel(responses)
            raise

    def _stop(self, stream: fence.ResponseStream) -> None:
        if not stream.request_id:
            raise InvalidRequestError(refusal("stop", "needs the request id of the request to stop"))
        for responses in self._in_flight.with_id(stream.request_id):
            self._cancel(responses)
        stream.close()

    def _cancel(self, responses: _RequestResponses) -> None:
        for request_id in responses.request_ids:
            self._engine.cancel(request_id)

    def request_finished(self, responses: _RequestResponses) -> None:
        """Forget a request whose final response was sent."""
        self._in_flight.remove(responses)

    def sequence_finished(self, output: SequenceOutput) -> None:
        """Report a finished sequence's lengths and latencies."""
        self._metrics.report_sequence(output.stats)

    def make_responder(self, row: EngineRow, row_index: int | None) -> SequenceResponder:
        """Return the response builder of one sequence."""
        return SequenceResponder(row, row_index, self._vocabulary)

    def _watch(self) -> None:
        next_report_s = 0.0
        while not self._stopping.wait(self._settings.cancellation_check_period_s):
            for responses in self._in_flight.all():
                if responses.stream.is_cancelled():
                    self._cancel(responses)
            if (now_s := time.monotonic()) >= next_report_s:
                next_report_s = now_s + self._settings.stats_check_period_s
                self._metrics.report_iteration(self._engine.iteration_stats(), self._engine.pool)


class _RequestResponses:
    """The responses of one Triton request: its rows' sequences, and the FINAL flag with the last of them."""

    def __init__(self, stream: fence.ResponseStream, rows: list[EngineRow], model: TritonPythonModel) -> None:
        self.stream = stream
        self.request_ids: list[RequestId] = [row.generation.request_id for row in rows]
        self._model = model
        self._num_open_sequences = sum(row.generation.num_return_sequences for row in rows)
        tag_rows = len(rows) > 1
        self._responders = {
            (row.generation.request_id, index): model.make_responder(row, row_index if tag_rows else None)
            for row_index, row in enumerate(rows)
            for index in range(row.generation.num_return_sequences)
        }

    def on_output(self, output: SequenceOutput) -> None:
        """Send one output; called from the engine's delivery thread only."""
        if output.finish_reason is not None:
            self._num_open_sequences -= 1
            self._model.sequence_finished(output)
        is_final = self._num_open_sequences == 0
        if output.finish_reason is FinishReason.ERROR:
            self.stream.fail(EngineFailureError(output.error or "the engine failed"))
        elif output.finish_reason is FinishReason.CANCELLED and self.stream.is_cancelled():
            self.stream.fail(RequestCancelledError("the request was cancelled"))
        else:
            tensors = self._responders[output.request_id, output.sequence_index].respond(output)
            if tensors is not None:
                self.stream.send(tensors, final=is_final)
        if is_final:
            self._model.request_finished(self)


class _InFlight:
    """The requests being answered, found by object and by Triton request id (ids need not be unique)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: set[_RequestResponses] = set()

    def add(self, responses: _RequestResponses) -> None:
        with self._lock:
            self._responses.add(responses)

    def remove(self, responses: _RequestResponses) -> None:
        with self._lock:
            self._responses.discard(responses)

    def all(self) -> list[_RequestResponses]:
        with self._lock:
            return list(self._responses)

    def with_id(self, request_id: str) -> list[_RequestResponses]:
        return [responses for responses in self.all() if responses.stream.request_id == request_id]


def _check_not_decoupled(rows: list[EngineRow]) -> None:
    if len(rows) > 1:
        msg = "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy."
        raise UnsupportedFeatureError(msg)
    if rows[0].report.streaming:
        msg = "Streaming is only supported if model is deployed using decoupled mode."
        raise UnsupportedFeatureError(msg)
    if rows[0].generation.num_return_sequences > 1:
        msg = refusal(
            "num_return_sequences", "above 1 requires decoupled mode", given=rows[0].generation.num_return_sequences
        )
        raise UnsupportedFeatureError(msg)
