"""The running tritonserver of this home, as a promotion sees it: administration, live repository, metrics, a client."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from enginehouse_backends.server import release_models
from enginehouse_backends.server.scrape import read_metrics
from enginehouse_backends.server.supervisor import is_server_of, write_state
from enginehouse_builders.promotion.live import Memory, Served
from enginehouse_cli.release_memory import plan_memory
from enginehouse_client import FRONT_DOOR, Client
from enginehouse_contract.errors import (
    EnginehouseError,
    EngineUnavailableError,
    LedgerUnavailableError,
    OverloadedError,
    PromotionError,
)
from enginehouse_contract.release import release_name, release_of_model
from enginehouse_contract.tensors import ENSEMBLE, TENSORRT_LLM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from enginehouse_backends.server.administration import TritonAdministration
    from enginehouse_backends.server.scrape import Series
    from enginehouse_backends.server.supervisor import ServerState
    from enginehouse_builders.promotion.journal import Routing
    from enginehouse_contract.release import Release
    from enginehouse_contract.settings import Settings

_CHECK_PROMPT: Final = "The quick brown fox"
_CHECK_TIMEOUT_S: Final = 120.0
_READ_BACK_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
_ROUTES_PERIOD_S: Final = 0.06  # the front door looks at its table every 50 ms
_OPEN_ROWS: Final = "nv_llm_front_door_open_rows"
_ENGINE_REQUESTS: Final = "nv_trt_llm_request_metrics"


class TritonLiveServer:
    """Implements :class:`enginehouse_builders.promotion.live.LiveServer` over one server."""

    def __init__(
        self,
        settings: Settings,
        state: ServerState,
        administration: TritonAdministration,
        front_door: Mapping[str, str],
    ) -> None:
        self._settings = settings
        self._repository = settings.repository_dir
        self._state = state
        self._administration = administration
        self._front_door = front_door

    # ---- what it is and holds ----

    def require_ours(self) -> None:
        """Raise unless the server is up and serves this home's repository."""
        if not is_server_of(self._state, self._repository):
            msg = (
                f"the server with pid {self._state.pid} serves another repository than {self._repository}; "
                "stop it, and start one with `enginehouse serve`."
            )
            raise PromotionError(msg)
        self._administration.require_ready()
        models = self._administration.models()
        starting = [name for name in (*release_models.ALIASES, FRONT_DOOR) if name not in models]
        if starting:
            msg = f"the server at {self._state.grpc_url} does not know `{starting[0]}`: it serves another repository."
            raise PromotionError(msg)
        if models[FRONT_DOOR].state == "LOADING":
            raise EngineUnavailableError(f"the server at {self._state.grpc_url} is still loading; try again.")

    def loaded(self) -> set[int]:
        """Return the releases of which some model holds memory."""
        numbers = {
            release_of_model(name) for name, model in self._administration.models().items() if model.holds_memory
        }
        return {number for number in numbers if number is not None}

    def is_ready(self, release: Release) -> bool:
        """Whether every model of the release answers."""
        models = self._administration.models()
        return all(model in models and models[model].is_ready for model in release.models)

    def memory_for(self, release: Release) -> Memory:
        """Compare what the release needs with what the host has free beside what is loaded."""
        return plan_memory(release)

    # ---- a release's own models ----

    def publish(self, release: Release) -> None:
        """Put the release's models into the live repository, and list it for the front door with share 0.

        While it loads, the front door loads its tokenizer, so that no request waits for one later.
        """
        release_models.publish_release(self._repository, release)
        if release.name not in release_models.read_routes(self._repository):
            release_models.add_routes(self._repository, [release])

    def retract(self, release: Release) -> None:
        """Take the release's models out of the live repository."""
        release_models.retract_release(self._repository, release)

    def load(self, release: Release) -> float:
        """Load the release's models, parts first, and let them answer once: an engine's first step is a slow one.

        On failure unload what did load, and raise the server's reason.
        """
        started_s = time.perf_counter()
        try:
            for model in release.models:
                self._administration.load(model)
            self._ask_pipeline(release)
        except EnginehouseError:
            with contextlib.suppress(EnginehouseError):
                self.unload(release)
            raise
        return time.perf_counter() - started_s

    def unload(self, release: Release) -> None:
        """Unload the release's models, the ensemble over them first."""
        models = self._administration.models()
        for model in reversed(release.models):
            if model in models and models[model].holds_memory:
                self._administration.unload(model)

    def check(self, release: Release) -> None:
        """Compare the engine's build id, and ask through the release's own pipeline.

        Raises :class:`PromotionError` when it does not answer with text of its own.
        """
        engine = release.model(TENSORRT_LLM.name)
        if (found := self._administration.parameters(engine).get("build_digest")) != release.build_id:
            raise PromotionError(f"`{engine}` says it serves build {found}, not {release.build_id}.")
        if not self._ask_pipeline(release):
            msg = f"{release.name} failed its check: `{release.model(ENSEMBLE.name)}` answered without any text."
            raise PromotionError(msg)

    def _ask_pipeline(self, release: Release) -> str:
        pipeline = release.model(ENSEMBLE.name)
        try:
            with Client(self._state.grpc_url) as client:
                return client.generate(
                    _CHECK_PROMPT, max_tokens=3, min_tokens=2, model=pipeline, timeout_s=_CHECK_TIMEOUT_S
                ).text
        except EnginehouseError as error:
            raise PromotionError(f"{release.name} does not answer through `{pipeline}`: {error}") from error

    # ---- the stable names ----

    def switch(self, routing: Routing, releases: Mapping[int, Release]) -> float:
        """Point every stable name at the routing's releases; return since when the server was seen to answer so.

        The front door is asked: the request that proves it was sent at the time returned, and answered later.
        """
        stable = releases[routing.stable]
        for release in releases.values():
            if not self.is_ready(release):  # a pin on a model that is not ready would unload the stable name
                raise PromotionError(f"{release.name} is not loaded; nothing was switched.")
        self._wait_until_met(releases)
        for name in release_models.ALIASES:
            if self._pointed_at(name) != stable.name:
                release_models.point_stable_name(self._repository, name, stable, self._front_door)
                self._administration.load(name)
        release_models.point_stable_name(self._repository, FRONT_DOOR, stable, self._front_door)  # for its next start
        release_models.write_routes(self._repository, _shares(routing, releases), by=routing.by)
        switched_s = self._read_back(routing, releases)
        write_state(self._settings.home, replace(self._state, build_id=stable.build_id))
        return switched_s

    def served(self) -> Served:
        """Read back what the stable names are pinned to in the server, and the front door's route table."""
        pointed = {name: self._pointed_at(name) for name in release_models.ALIASES}
        shares = {
            number: share
            for name, share in release_models.read_routes(self._repository).items()
            if share > 0 and (number := _number(name)) is not None
        }
        total = sum(shares.values()) or 1.0
        shares = {number: share / total for number, share in shares.items()}
        build_id = self._administration.parameters(ENSEMBLE.name).get("build_digest", "")
        if len(set(pointed.values())) > 1 or None in pointed.values():
            words = ", ".join(f"`{name}` answers from {where or 'nothing'}" for name, where in pointed.items())
            return Served(None, build_id, shares, words)
        stable = _number(pointed[ENSEMBLE.name] or "")
        names = ", ".join(f"{release_name(number)} {share:.0%}" for number, share in shares.items()) or "nothing known"
        problem = f"the stable names answer from {pointed[ENSEMBLE.name]} and the front door from {names}"
        return Served(stable, build_id, shares, problem)

    def num_open(self, release: Release) -> int:
        """Return the front door's open rows of a release and its engine's active and waiting requests, summed."""
        engine = release.model(TENSORRT_LLM.name)
        return int(sum(series.value for series in self.metrics() if _counts_for(series, release.name, engine)))

    def metrics(self) -> list[Series]:
        """Return the server's metrics."""
        return read_metrics(f"http://127.0.0.1:{self._state.metrics_port}/metrics")

    def _wait_until_met(self, releases: Mapping[int, Release]) -> None:
        """Wait until the front door has loaded the tokenizers of these releases, which its metrics tell."""
        wanted = {release.name for release in releases.values()}
        deadline_s = time.monotonic() + _READ_BACK_TIMEOUT_S
        while missing := wanted - {s.labels["release"] for s in self.metrics() if s.name == _OPEN_ROWS}:
            if time.monotonic() >= deadline_s:
                msg = f"the front door did not take up {', '.join(sorted(missing))} within {_READ_BACK_TIMEOUT_S:g} s."
                raise PromotionError(msg)
            time.sleep(_POLL_S)

    def _pointed_at(self, stable_name: str) -> str | None:
        """Return the release that an alias answers from, by its pinned steps as the server holds them."""
        numbers = {release_of_model(model) for model in self._administration.step_models(stable_name)}
        number = numbers.pop() if len(numbers) == 1 else None
        if number is None:
            return None
        models = self._administration.models()
        return release_name(number) if models[stable_name].is_ready else None

    def _read_back(self, routing: Routing, releases: Mapping[int, Release]) -> float:
        """Compare what answers with what should: the pins by the server's configs, the front door by asking it."""
        served = self.served()
        if not served.matches(routing):
            raise PromotionError(f"after the switch {served.problem}, not {release_name(routing.stable)}.")
        time.sleep(_ROUTES_PERIOD_S)
        low, switched_s = 0.0, 0.0
        for release, share in _shares(routing, releases):
            if share > 0:
                switched_s = max(switched_s, self._ask_front_door(release, low, low + share))
            low += share
        return switched_s

    def _ask_front_door(self, release: Release, low: float, high: float) -> float:
        """Ask with a request id that the share from *low* to *high* covers, until the release's build answers.

        Returns when the request that it answered was sent.
        """
        deadline_s = time.perf_counter() + _READ_BACK_TIMEOUT_S
        while True:
            sent_s = time.perf_counter()
            try:
                with Client(self._state.grpc_url) as client:
                    request_id = _request_id(release, low, high)
                    answer = client.generate(
                        _CHECK_PROMPT, max_tokens=1, request_id=request_id, timeout_s=_CHECK_TIMEOUT_S
                    )
            except (OverloadedError, LedgerUnavailableError):
                return sent_s  # the front door has no room for the question; its table and the pins were compared
            if answer.build_id == release.build_id:
                return sent_s
            if sent_s >= deadline_s:
                msg = f"the front door answers from build {answer.build_id}, not from {release.build_id}."
                raise PromotionError(msg)


def _request_id(release: Release, low: float, high: float) -> str:
    """A request id that the front door's shares send to the release from *low* to *high*."""
    stem = f"promotion-{release.name}-{time.time_ns():x}"
    return next(name for number in itertools.count() if low <= sticky_point(name := f"{stem}-{number}") < high)


def sticky_point(key: str) -> float:
    """Return where a key falls in [0, 1) among the shares, as the front door reckons."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def _shares(routing: Routing, releases: Mapping[int, Release]) -> list[tuple[Release, float]]:
    if routing.canary is None:
        return [(releases[routing.stable], 1.0)]
    return [(releases[routing.stable], 1.0 - routing.share), (releases[routing.canary], routing.share)]


def _counts_for(series: Series, release: str, engine: str) -> bool:
    if series.name == _OPEN_ROWS:
        return series.labels.get("release") == release
    is_request = series.labels.get("request_type") in {"active", "waiting"}
    return series.name == _ENGINE_REQUESTS and series.labels.get("model") == engine and is_request


def _number(name: str) -> int | None:
    digits = name.removeprefix("r")
    return int(digits) if digits.isdecimal() else None
