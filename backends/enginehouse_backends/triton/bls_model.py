"""The Triton model ``tensorrt_llm_bls``: the front door, over the server's own engine models.

Drop-in for NVIDIA's model of the same name, with its tensors and more (`enginehouse_contract.tensors`). ``execute``
tokenizes, queues and returns; rows are answered from their own threads.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from enginehouse_backends.accounting.setup import open_meter
from enginehouse_backends.admission.fair_queue import QueueLimits
from enginehouse_backends.front_door.door import DoorSettings, FrontDoor, Job, Request
from enginehouse_backends.front_door.engine_client import prompt_inputs, stop_engine
from enginehouse_backends.front_door.generation_mode import open_deltas
from enginehouse_backends.front_door.open_rows import OpenRows
from enginehouse_backends.front_door.request import DEFAULT_TENANT, client_wording, is_probe, parse_front_request
from enginehouse_backends.front_door.routes import ROUTES_FILE, Route, RouteTable
from enginehouse_backends.front_door.row_runner import RowRunner, TextOptions
from enginehouse_backends.front_door.row_usage import RowUsage
from enginehouse_backends.front_door.tracing import open_tracer
from enginehouse_backends.residency.admin import OwnServer
from enginehouse_backends.residency.engines import ResidentEngines
from enginehouse_backends.residency.services import SERVICES_FILE, ServiceTable
from enginehouse_backends.tokenization.tokenizer import load_tokenizer
from enginehouse_backends.tokenization.word_lists import encode_word_list, tokenize_words
from enginehouse_backends.triton import fence
from enginehouse_backends.triton.engine_call import EngineCalls
from enginehouse_backends.triton.front_door_metrics import FrontDoorMetrics
from enginehouse_backends.triton.model_parameters import ModelParameters
from enginehouse_backends.triton.preprocessing import Preprocessor, read_engine_limits
from enginehouse_contract.errors import ConfigurationError, EnginehouseError, InvalidRequestError, refusal
from enginehouse_contract.manifest import read_manifest
from enginehouse_contract.model_config import ENGINEHOUSE_PARAMETERS
from enginehouse_contract.settings import load_settings
from enginehouse_contract.tensors import ENGINE_USAGE_NAMES, TENSORRT_LLM_BLS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from enginehouse_backends.front_door.request import FrontRow

_LOGGER = logging.getLogger(__name__)

_NUM_ADMISSION_THREADS: Final = 32
_METRICS_PERIOD_S: Final = 0.5


class TritonPythonModel:
    """Answers requests to the front door."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the parameters and the default route, and open the door."""
        fence.route_logging_to_server()
        fence.let_threads_take_turns()
        parameters = ModelParameters.from_model_config(args["model_config"])
        parameters.check_names((*TENSORRT_LLM_BLS.parameters, *ENGINEHOUSE_PARAMETERS))
        if "multimodal_encoders_name" in parameters:
            raise ConfigurationError(refusal("multimodal_encoders_name", "cannot be set: image input is not served"))
        default = Route(
            release=parameters.text("release", "unnumbered"),
            engine_model=parameters.text("tensorrt_llm_model_name", "tensorrt_llm"),
            draft_model=parameters.text("tensorrt_llm_draft_model_name") or None,
            tokenizer_dir=parameters.required("tokenizer_dir"),
            engine_dir=parameters.required("gpt_model_path"),
            build_id=parameters.text("build_digest"),
        )
        self._routes = RouteTable(Path(args["model_repository"]) / ROUTES_FILE, default)
        self._releases = _Releases()
        self._releases.get(default)
        self._options = TextOptions(
            skip_special_tokens=parameters.flag("skip_special_tokens", default=True),
            accumulate_tokens=parameters.flag("accumulate_tokens", default=False),
        )
        limits = QueueLimits(
            max_active=parameters.integer("max_active_requests", 64, 1),
            max_waiting=parameters.integer("max_queue_size", 256, 0),
        )
        settings = DoorSettings(
            limits, inter_token_timeout_s=parameters.integer("inter_token_timeout_ms", 60_000, 1) / 1000
        )
        installation = load_settings()
        self._meter = open_meter(installation)
        self._tracer = open_tracer(installation.otlp_endpoint)
        registry = fence.MetricRegistry({"model": args["model_name"], "version": args["model_version"]})
        self._metrics = FrontDoorMetrics(registry, self._meter.counts)
        self._calls = EngineCalls(installation.server_url)
        call_engine = self._calls if parameters.flag("engine_reports_usage", default=True) else self._call_foreign
        self._services = ServiceTable(installation.services_dir / SERVICES_FILE)
        own_server = OwnServer(installation.home, lambda: self._services.current().grpc_url)
        self._engines = ResidentEngines(call_engine, own_server, self._services.current)
        self._open_rows = OpenRows()
        self._door = FrontDoor(settings, self._engines, self._run_row, self._end_job)
        # Reservations are made durable: many at once share one commit, one after another would queue.
        self._admission = ThreadPoolExecutor(_NUM_ADMISSION_THREADS, thread_name_prefix="front-door-admission")
        self._closing = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="front-door-metrics", daemon=True)
        self._reporter.start()

    def execute(self, requests: list[Any]) -> None:
        """Queue every request; each is answered from its rows' threads, or here when it is refused."""
        for request in requests:
            stream = fence.ResponseStream(request)
            try:
                inputs = fence.read_inputs(request, TENSORRT_LLM_BLS.inputs)
                self._accept(stream, inputs, fence.read_parameters(request))
            except Exception as error:  # noqa: BLE001 - every request must be answered, whatever went wrong
                stream.fail(_in_client_words(error))

    def finalize(self) -> None:
        """Close the door, and the books after it."""
        self._closing.set()
        self._reporter.join()
        self._admission.shutdown(wait=True)
        self._engines.close()
        self._door.close()
        self._calls.close()
        self._meter.close()
        self._tracer.close()

    def _accept(
        self, stream: fence.ResponseStream, inputs: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any]
    ) -> None:
        if is_probe(inputs):
            self._admission.submit(self._answer_probe, stream)
            return
        rows = parse_front_request(inputs, parameters)
        request_id = stream.request_id or f"{id(stream):x}-{time.monotonic_ns():x}"
        request = Request(stream, request_id, sum(row.num_sequences for row in rows))
        route = self._choose_route(rows, request_id)
        self._open_rows.begin(route.release, len(rows))
        try:
            release = self._releases.get(route)
            jobs = self._make_jobs(request, rows, route, release)
        except Exception:
            self._open_rows.end(route.release, len(rows))
            raise
        self._admission.submit(self._admit, jobs, release.model_name)

    def _answer_probe(self, stream: fence.ResponseStream) -> None:
        """Answer with the build that would serve, once every engine that may be chosen has answered."""
        try:
            routes = [route for route in self._routes.current() if route.weight > 0]
            for route in routes:
                stop_engine(self._door.call_engine, route.engine_model, f"probe-{id(stream):x}")
            stream.send({"build_id": np.array([[routes[0].build_id.encode()]], np.object_)}, final=True)
        except Exception as error:  # noqa: BLE001 - every request must be answered, whatever went wrong
            stream.fail(error)

    def _call_foreign(
        self,
        model_name: str,
        inputs: Mapping[str, NDArray[Any]],
        requested_outputs: Sequence[str],
        *,
        request_id: str,
        parameters: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Call an engine without asking for outputs that only our configs list."""
        known = [name for name in requested_outputs if name not in ENGINE_USAGE_NAMES]
        return self._calls(model_name, inputs, known, request_id=request_id, parameters=parameters)

    def _choose_route(self, rows: Sequence[FrontRow], request_id: str) -> Route:
        service = rows[0].service
        if any(row.service != service for row in rows):
            raise InvalidRequestError(refusal("service", "must be the same in all rows of a request"))
        if service is not None:
            return self._services.route(service)
        by_tenant = self._routes.sticky_by == "tenant" and rows[0].tenant != DEFAULT_TENANT
        return self._routes.choose(rows[0].tenant if by_tenant else request_id)

    def _make_jobs(self, request: Request, rows: Sequence[FrontRow], route: Route, release: _Release) -> list[Job]:
        now_s = time.monotonic()
        jobs = []
        for index, row in enumerate(rows):
            prompt_token_ids = release.encode(row)
            jobs.append(
                Job(
                    request,
                    row,
                    index if len(rows) > 1 else None,
                    route,
                    prompt_token_ids,
                    None if row.timeout_s is None else now_s + row.timeout_s,
                    RowUsage(len(prompt_token_ids), row.num_sequences),
                )
            )
        return jobs

    def _end_job(self, job: Job) -> None:
        self._metrics.report_job(job)
        self._tracer.report_job(job)
        self._open_rows.end(job.route.release)

    def _admit(self, jobs: list[Job], model_name: str) -> None:
        """Reserve what the rows of one request may use, and queue them; or refuse them all."""
        try:
            for job in jobs:
                job.model_name = model_name
                job.accounting = self._meter.open(
                    tenant=job.row.tenant,
                    key_id=job.row.key_id,
                    request_id=job.accounting_id,
                    model=model_name,
                    build_id=job.route.build_id,
                    upper_bound=job.usage.upper_bound(job.row.max_tokens),
                )
            self._door.accept(jobs)
        except Exception as error:  # noqa: BLE001 - every request must be answered, whatever went wrong
            for job in jobs:
                job.accounting.release(str(error))
            self._open_rows.end(jobs[0].route.release, len(jobs))
            jobs[0].request.sink.fail(_in_client_words(error))

    def _report(self) -> None:
        while not self._closing.wait(_METRICS_PERIOD_S):
            self._meet_releases()
            self._metrics.report_door(self._door)
            self._metrics.report_open_rows(self._open_rows.counts())

    def _meet_releases(self) -> None:
        """Load the tokenizers of releases that are new in the route table, before their first request waits for it.

        A promotion lists a release with weight 0 first, and sees by its gauge of open rows that it was met.
        """
        for route in self._routes.current():
            try:
                self._releases.get(route)
            except (EnginehouseError, OSError) as error:
                _LOGGER.warning("release %s: %s", route.release, error)
            else:
                self._open_rows.begin(route.release, 0)

    def _run_row(self, door: FrontDoor, job: Job) -> None:
        release = self._releases.get(job.route)
        end_id = release.tokenizer.eos_id if job.row.end_id is None else job.row.end_id
        inputs = release.engine_inputs(job.row, job.prompt_token_ids, end_id)
        runner = RowRunner(job, release.tokenizer.vocabulary, self._options, end_id)
        try:
            runner.run(door, open_deltas(door.call_engine, job, inputs, end_id))
        except EnginehouseError as error:
            raise _in_client_words(error) from error


class _Releases:
    """What the front door knows of each release it has met: its tokenizer and its engine's limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], _Release] = {}

    def get(self, route: Route) -> _Release:
        key = (route.tokenizer_dir, route.engine_dir)
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            return known
        release = _Release(Path(route.tokenizer_dir), Path(route.engine_dir))  # others need not wait for this one
        with self._lock:
            return self._known.setdefault(key, release)


class _Release:
    def __init__(self, tokenizer_dir: Path, engine_dir: Path) -> None:
        self.model_name = _model_name(engine_dir)
        self.tokenizer = load_tokenizer(tokenizer_dir)
        self._vocab_size = read_engine_limits(engine_dir)[1]
        self._preprocessor = Preprocessor(self.tokenizer, *read_engine_limits(engine_dir), add_special_tokens=True)

    def encode(self, row: FrontRow) -> list[int]:
        """Token ids of the row's text or messages; refused when they do not fit."""
        if row.messages is not None:
            return self._preprocessor.encode_messages(row.messages)
        return self._preprocessor.encode_text(row.text or "")

    def engine_inputs(
        self, row: FrontRow, prompt_token_ids: Sequence[int], end_id: int | None
    ) -> dict[str, NDArray[Any]]:
        """The engine's tensors for one row: prompt, sampling values, and words as token ids."""
        inputs = {**row.engine_inputs, **prompt_inputs(prompt_token_ids, row.max_tokens)}
        if end_id is not None and end_id >= 0:
            inputs["end_id"] = np.array([[end_id]], np.int32)
        # Stop words go to the engine too, so that it ends by itself where it can; the text is cut here in any case.
        for field, engine_name, words in (
            ("bad_words", "bad_words_list", row.bad_words),
            ("stop_words", "stop_words_list", row.stop_words),
        ):
            if words:
                token_ids = tokenize_words(self.tokenizer, [word.encode() for word in words], field)
                inputs[engine_name] = encode_word_list(token_ids)[None]
        if row.bias_words:
            inputs["embedding_bias"] = self._embedding_bias(row)
        return inputs

    def _embedding_bias(self, row: FrontRow) -> NDArray[np.float32]:
        return self._preprocessor.embedding_bias(
            [word.encode() for word in row.bias_words], row.bias_weights, "embedding_bias_words"
        )[None]


def _model_name(engine_dir: Path) -> str:
    """The name that price books know the model by: the build's, or its folder's where another tool made it."""
    try:
        return read_manifest(engine_dir).model_name
    except EnginehouseError:
        return engine_dir.name


def _in_client_words(error: BaseException) -> BaseException:
    """The same error with the names the client used."""
    if not isinstance(error, EnginehouseError):
        return error
    worded = type(error)(client_wording(str(error)))
    worded.__cause__ = error
    return worded
