"""Engines loaded on demand, between a scripted engine and a scripted server."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from enginehouse_backends.front_door.engine_client import prompt_inputs, stop_engine
from enginehouse_backends.front_door.routes import Route
from enginehouse_backends.residency.engines import ResidentEngines
from enginehouse_backends.residency.records import ManagedEngine, ResidencyLimits
from enginehouse_backends.residency.services import Services
from enginehouse_contract.errors import (
    EngineUnavailableError,
    OverloadedError,
    PromotionError,
    RequestCancelledError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class ScriptedServer:
    """Loads when ``may_load`` is set, records what it did, and answers calls to what is loaded."""

    loaded: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    may_load: threading.Event = field(default_factory=threading.Event)
    load_error: PromotionError | None = None
    is_up: bool = True
    gate: threading.Event = field(default_factory=threading.Event)  # holds back the second response

    def loaded_engines(self) -> set[str]:
        if not self.is_up:
            raise EngineUnavailableError("the server is still starting.")
        return set(self.loaded)

    def load(self, engine: str) -> None:
        assert self.may_load.wait(20)
        if self.load_error is not None:
            raise self.load_error
        self.loaded.add(engine)
        self.done.append(f"load {engine}")

    def unload(self, engine: str) -> None:
        self.loaded.discard(engine)
        self.done.append(f"unload {engine}")

    def clear(self, engine: str) -> None:
        self.done.append(f"clear {engine}")

    def call(
        self, model_name: str, inputs: Any, outputs: Any, *, request_id: str, parameters: Any = None
    ) -> Iterator[Any]:
        if model_name not in self.loaded:
            raise EngineUnavailableError(f"the engine is not there to answer: {model_name} is not ready")
        if "stop" in inputs:
            return
        yield {"output_ids": np.array([[[1]]], np.int32)}
        assert self.gate.wait(20)
        yield {"output_ids": np.array([[[2]]], np.int32)}


@dataclass
class House:
    """A server, the engines in front of it, and the services they read."""

    server: ScriptedServer
    services: Services
    engines: ResidentEngines = field(init=False)

    def __post_init__(self) -> None:
        self.engines = ResidentEngines(self.server.call, self.server, lambda: self.services)

    def ask(self, engine: str, request_id: str = "r") -> Iterator[Any]:
        """Begin a call."""
        return iter(self.engines(engine, prompt_inputs((1,), 4), ("output_ids",), request_id=request_id))


def services(budget: int, *engines: ManagedEngine, **limits: float) -> Services:
    """Services named as their engines."""
    routes = {engine.name: Route(engine.name, engine.name, "", "", "") for engine in engines}
    return Services(ResidencyLimits(budget, **limits), routes, engines)  # type: ignore[arg-type]


@pytest.fixture
def house() -> Iterator[House]:
    """Room for one of two engines; loads and answers are not held back."""
    house = House(ScriptedServer(), services(100, ManagedEngine("a", 60), ManagedEngine("b", 60)))
    house.server.may_load.set()
    house.server.gate.set()
    yield house
    house.engines.close()


def test_a_call_loads_its_engine_and_unloads_the_idle_one(house: House) -> None:
    """Calls in turn: each finds its engine loaded, and never both."""
    for engine in ("a", "b", "a"):
        assert len(list(house.ask(engine))) == 2
        assert house.server.loaded == {engine}

    assert house.server.done == ["load a", "unload a", "load b", "unload b", "load a"]


def test_other_engines_are_called_as_they_are(house: House) -> None:
    """What no service names is nobody's business here."""
    house.server.loaded.add("tensorrt_llm-r1")

    assert len(list(house.ask("tensorrt_llm-r1"))) == 2
    assert house.server.done == []


def test_a_stream_keeps_its_engine_until_it_ends(house: House) -> None:
    """While a stream is read the other engine's request waits; it is served when the stream ends."""
    house.server.gate.clear()
    stream = house.ask("a")
    next(stream)
    answered = threading.Event()

    def ask_b() -> None:
        next(house.ask("b"))
        answered.set()

    thread = threading.Thread(target=ask_b)
    thread.start()
    assert not answered.wait(0.2)
    assert house.server.loaded == {"a"}
    house.server.gate.set()
    assert len(list(stream)) == 1
    thread.join(20)

    assert answered.is_set()
    assert house.server.done == ["load a", "unload a", "load b"]


def test_a_stream_that_is_closed_early_lets_go(house: House) -> None:
    """A client that leaves ends the lease with its generator."""
    stream = house.ask("a")
    next(stream)
    stream.close()  # type: ignore[attr-defined]

    assert len(list(house.ask("b"))) == 2


def test_the_wait_is_bounded(house: House) -> None:
    """An engine that does not come in time: a retry hint."""
    house.server.may_load.clear()
    house.services = services(100, ManagedEngine("a", 60), max_wait_s=0.05)

    with pytest.raises(OverloadedError, match=r"not loaded within 0\.05 s") as caught:
        next(house.ask("a"))

    assert caught.value.retry_after_s is not None
    house.server.may_load.set()


def test_a_stop_ends_the_wait(house: House) -> None:
    """A request that is stopped while its engine loads ends at once; stopping what does not wait is well."""
    house.server.may_load.clear()
    errors: list[BaseException] = []
    waiting = threading.Event()

    def ask() -> None:
        stream = house.ask("a", "mine")
        waiting.set()
        try:
            next(stream)
        except RequestCancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert waiting.wait(20)
    while thread.is_alive():
        stop_engine(house.engines, "a", "another")
        stop_engine(house.engines, "a", "mine")
        thread.join(0.01)

    assert "stopped while its engine was loading" in str(errors[0])
    house.server.may_load.set()


def test_a_failed_load_is_told(house: House) -> None:
    """The server's reason reaches the request, and the next one gets it with a hint."""
    house.server.load_error = PromotionError("the server could not load `a`: no such file.")

    with pytest.raises(EngineUnavailableError, match="did not load: the server could not load `a`: no such file"):
        next(house.ask("a"))
    with pytest.raises(OverloadedError, match="Retry in about"):
        next(house.ask("a"))


def test_an_engine_unloaded_by_hand_is_loaded_again(house: House) -> None:
    """The request that finds it gone is answered all the same."""
    list(house.ask("a"))
    house.server.loaded.clear()

    assert len(list(house.ask("a"))) == 2
    assert house.server.done[-2:] == ["clear a", "load a"]


def test_a_dead_engine_is_seen_by_the_liveness_check_while_streams_hang_on_it(house: House) -> None:
    """The check fails, so that the front door ends the streams; the engine is cleared away for the next request."""
    house.server.gate.clear()
    stream = house.ask("a")
    next(stream)
    house.server.loaded.clear()
    with pytest.raises(EngineUnavailableError):
        next(house.ask("a"))

    with pytest.raises(EngineUnavailableError):
        stop_engine(house.engines, "a", "liveness-1")
    house.server.gate.set()

    assert len(list(house.ask("a"))) == 2


def test_what_is_loaded_already_is_adopted() -> None:
    """A front door that was reloaded counts the engines that it had loaded before, pinned ones load by themselves."""
    pinned = ManagedEngine("p", 30, is_pinned=True)
    house = House(ScriptedServer({"b"}), services(100, ManagedEngine("a", 60), ManagedEngine("b", 60), pinned))
    house.server.may_load.set()
    house.server.gate.set()
    try:
        assert len(list(house.ask("a"))) == 2
        assert house.server.loaded == {"a", "p"}
    finally:
        house.engines.close()


def test_requests_wait_for_a_server_that_is_starting() -> None:
    """Nothing is loaded before the server says what it has; a request that came earlier is answered then."""
    house = House(ScriptedServer(is_up=False), services(100, ManagedEngine("a", 60)))
    house.server.may_load.set()
    house.server.gate.set()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(house.ask("a")))
    thread.start()
    thread.join(0.1)
    assert house.server.done == []
    house.server.is_up = True
    thread.join(20)
    house.engines.close()

    assert len(answers) == 2


def test_changed_services_take_effect(house: House) -> None:
    """An engine taken out is unloaded; a configuration that cannot be leaves the last one in force."""
    list(house.ask("a"))
    house.services = services(10, ManagedEngine("a", 60))
    assert len(list(house.ask("a"))) == 2

    house.services = services(100, ManagedEngine("b", 60))

    assert len(list(house.ask("b"))) == 2
    assert house.server.loaded == {"b"}


def test_closing_fails_what_waits() -> None:
    """No request outlives the front door."""
    house = House(ScriptedServer(), services(100, ManagedEngine("a", 60)))
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            next(house.ask("a"))
        except EngineUnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not house.engines._waits:
        thread.join(0.01)
    house.engines.close()
    thread.join(20)
    house.server.may_load.set()

    assert "shutting down" in str(errors[0])
