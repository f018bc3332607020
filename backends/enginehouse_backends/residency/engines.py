"""Engines that are there when they are called: a :class:`CallEngine` that loads what it calls, within a budget.

It stands between the front door and the server, so the front door knows nothing of it. One thread keeps the policy
going; each load and unload has a thread of its own, since a large engine takes minutes.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from enginehouse_backends.residency.policy import ResidencyPolicy
from enginehouse_contract.errors import (
    ConfigurationError,
    EnginehouseError,
    EngineUnavailableError,
    RequestCancelledError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from enginehouse_backends.front_door.engine_client import CallEngine, Tensors
    from enginehouse_backends.residency.records import Action, Lease
    from enginehouse_backends.residency.services import Services

_LOGGER = logging.getLogger(__name__)

_LOOK_PERIOD_S: Final = 0.5  # at least this often: a changed file, a server that came up
_NUM_TRIES: Final = 2  # of a call whose engine turns out to be gone before it answered


class EngineAdmin(Protocol):
    """Loads and unloads the server's engine models; raises errors of our tree."""

    def loaded_engines(self) -> set[str]:
        """Return the names of the models that are ready."""
        ...

    def load(self, engine: str) -> None:
        """Load a model; it is ready on return."""
        ...

    def unload(self, engine: str) -> None:
        """Unload a model; its memory is free on return."""
        ...

    def clear(self, engine: str) -> None:
        """Unload a model whose process is gone, so that it can be loaded anew."""
        ...


@dataclass(frozen=True, slots=True)
class _Wait:
    request_id: str
    engine: str
    lease: Future[Lease]


class ResidentEngines:
    """Calls engines, each loaded on demand. Engines that *current_services* does not name are called as they are."""

    def __init__(self, call_engine: CallEngine, admin: EngineAdmin, current_services: Callable[[], Services]) -> None:
        self._call_engine = call_engine
        self._admin = admin
        self._current_services = current_services
        self._services = current_services()
        self._policy = ResidencyPolicy(self._services.limits, self._services.engines)
        self._changed = threading.Condition()
        self._waits: dict[str, _Wait] = {}
        self._keys = itertools.count()
        self._is_adopted = False
        self._is_closing = False
        self._keeper = threading.Thread(target=self._keep, name="residency", daemon=True)
        self._keeper.start()

    def __call__(
        self,
        model_name: str,
        inputs: Tensors,
        requested_outputs: Sequence[str],
        *,
        request_id: str,
        parameters: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Call an engine as :class:`CallEngine` does; the first ``next`` may wait for a load.

        Raises :class:`OverloadedError` with a retry hint when the engine cannot be loaded within the bound.
        """

        def call() -> Iterator[dict[str, NDArray[Any]]]:
            return self._call_engine(
                model_name, inputs, requested_outputs, request_id=request_id, parameters=parameters
            )

        if not self._manages(model_name):
            return call()
        if "stop" in inputs and bool(np.any(inputs["stop"])):
            return self._stop(model_name, request_id, call)
        return self._generate(model_name, request_id, call)

    def close(self) -> None:
        """Fail what waits and end the keeper; what is loaded stays so."""
        with self._changed:
            self._is_closing = True
            for key in list(self._waits):
                self._resolve(key, EngineUnavailableError("the server is shutting down."))
            self._changed.notify_all()
        self._keeper.join()

    def _generate(
        self, engine: str, request_id: str, call: Callable[[], Iterator[dict[str, NDArray[Any]]]]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        for num_left in reversed(range(_NUM_TRIES)):
            lease = self._acquire(engine, request_id)
            has_answered = False
            try:
                for response in call():
                    has_answered = True
                    yield response
            except EngineUnavailableError:
                self._suspect(engine, lease)
                if has_answered or not num_left:
                    raise
            else:
                return
            finally:
                self._release(lease)

    def _stop(
        self, engine: str, request_id: str, call: Callable[[], Iterator[dict[str, NDArray[Any]]]]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Stop a request, also one that still waits. An engine that is not loaded has nothing to stop, and is well."""
        with self._changed:
            for key, wait in list(self._waits.items()):
                if wait.engine == engine and wait.request_id == request_id:
                    self._resolve(key, RequestCancelledError("stopped while its engine was loading."))
            if not self._policy.manages(engine) or self._policy.state_of(engine) != "ready":
                return
        try:
            yield from call()
        except EngineUnavailableError:
            self._lose(engine)
            raise

    def _acquire(self, engine: str, request_id: str) -> Lease:
        with self._changed:
            key = str(next(self._keys))
            lease = self._policy.enter(engine, key, time.monotonic())
            if lease is not None:
                return lease
            wait = self._waits[key] = _Wait(request_id, engine, Future())
            self._changed.notify_all()
        return wait.lease.result()

    def _release(self, lease: Lease) -> None:
        with self._changed:
            self._policy.leave(lease, time.monotonic())
            self._changed.notify_all()

    def _resolve(self, key: str, outcome: Lease | EnginehouseError) -> None:
        wait = self._waits.pop(key)
        self._policy.give_up(key)
        if isinstance(outcome, EnginehouseError):
            wait.lease.set_exception(outcome)
        else:
            wait.lease.set_result(outcome)

    def _resolve_all(self, outcomes: Mapping[str, Lease | EnginehouseError]) -> None:
        for key, outcome in outcomes.items():
            self._resolve(key, outcome)

    def _suspect(self, engine: str, lease: Lease) -> None:
        """Note that a call found the engine gone; the last one on it clears it away.

        While others hang on it, the front door's liveness check must find the same, since it is what ends them.
        """
        with self._changed:
            is_alone = self._policy.is_only_lease(lease)
        if is_alone:
            self._lose(engine)

    def _lose(self, engine: str) -> None:
        with self._changed:
            if self._policy.manages(engine) and (action := self._policy.lost(engine, time.monotonic())) is not None:
                self._start(action)

    def _manages(self, engine: str) -> bool:
        with self._changed:
            self._look_for_changes()
            return self._policy.manages(engine)

    # ---- keeper thread ----

    def _keep(self) -> None:
        while True:
            with self._changed:
                if self._is_closing:
                    return
            if not self._is_adopted:
                self._adopt()
            with self._changed:
                try:
                    self._look_for_changes()
                    pause_s = self._step()
                except Exception:
                    _LOGGER.exception("residency: a step failed")
                    pause_s = _LOOK_PERIOD_S
                if not self._is_closing:
                    self._changed.wait(pause_s)

    def _step(self) -> float:
        now_s = time.monotonic()
        self._resolve_all(self._policy.expired(now_s))
        while self._is_adopted and (action := self._policy.next_action(now_s)) is not None:
            self._start(action)
        wakeup_s = self._policy.next_wakeup_s(now_s)
        return _LOOK_PERIOD_S if wakeup_s is None else min(max(wakeup_s - now_s, 0.0), _LOOK_PERIOD_S)

    def _look_for_changes(self) -> None:
        services = self._current_services()
        if services is self._services:
            return
        self._services = services
        try:
            self._resolve_all(self._policy.configure(services.limits, services.engines))
        except ConfigurationError as error:
            _LOGGER.error("residency: %s", error)  # noqa: TRY400 - the message is the operator's
            return
        self._is_adopted = False
        self._changed.notify_all()

    def _adopt(self) -> None:
        """Find out what is loaded already: by hand, at the server's start, or before this front door was reloaded."""
        try:
            loaded = self._admin.loaded_engines()
        except EnginehouseError:
            return  # the server is still starting; tried again with the next step
        with self._changed:
            for engine in loaded:
                if self._policy.manages(engine) and self._policy.state_of(engine) == "absent":
                    self._grant(engine)
            self._is_adopted = True

    def _start(self, action: Action) -> None:
        name = f"residency-{action.kind}-{action.engine}"
        threading.Thread(target=self._perform, args=(action,), name=name, daemon=True).start()

    def _perform(self, action: Action) -> None:
        failure: Exception | None = None
        try:
            getattr(self._admin, action.kind)(action.engine)
        except Exception as error:  # noqa: BLE001 - those who wait must be told, whatever it was
            failure = error
        with self._changed:
            if failure is not None:
                _LOGGER.warning("residency: %s of %s failed: %s", action.kind, action.engine, failure)
                self._resolve_all(self._policy.failed(action.engine, str(failure), time.monotonic()))
            elif action.kind == "load":
                self._grant(action.engine)
            else:
                self._policy.unloaded(action.engine)
            self._changed.notify_all()

    def _grant(self, engine: str) -> None:
        self._resolve_all(self._policy.loaded(engine, time.monotonic()))
