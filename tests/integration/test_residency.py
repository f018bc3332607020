"""Several services on a real server under a memory budget that holds one of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc
from tests.support.servers import RunningServer, running_server
from tests.support.tiny_models import TinyModel

from enginehouse_backends.residency.publishing import Service, publish_services
from enginehouse_backends.residency.records import ResidencyLimits
from enginehouse_builders.cpu.build import BuildOptions, build_engine
from enginehouse_client import Client
from enginehouse_contract.errors import (
    EnginehouseError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from enginehouse_contract.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

SIZE = 100 << 20


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny builds of random weights."""
    folder = tmp_path_factory.mktemp("builds")
    sources = [TinyModel(seed=seed).write_gguf(folder / f"tiny{seed}.gguf") for seed in (1, 2)]
    return [build_engine(BuildOptions(model=source), folder / "store").build_dir for source in sources]


def service(name: str, build_dir: Path, *, is_pinned: bool = False) -> Service:
    """One that takes half of what the tests' budgets hold, and a little."""
    parameters = {"kv_cache_memory_budget_bytes": str(16 << 20), "num_threads": "1"}
    return Service(name, read_manifest(build_dir).build_id, build_dir, SIZE, is_pinned, parameters)


def publish(server: RunningServer, services: list[Service], **limits: float) -> None:
    """Put services in force on a running server."""
    budget = int(limits.pop("budget", 1.5 * SIZE))
    publish_services(server.settings.services_dir, services, ResidencyLimits(budget, **limits))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server(builds: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose stable engine is tiny too."""
    home = tmp_path_factory.mktemp("home")
    with running_server(builds[0], home, {"kv_cache_memory_budget_bytes": str(16 << 20)}) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    """A client that does not try again by itself."""
    with Client(server.grpc_url, max_retries=0) as client:
        yield client


def resident(server: RunningServer) -> set[str]:
    """The services whose engines the server holds."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as admin:
        models = admin.get_model_repository_index().models
    return {model.name.split("-")[1] for model in models if model.state == "READY" and model.name.count("-") == 2}


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for something the server does by itself."""
    deadline_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def ask(client: Client, name: str, max_tokens: int = 4) -> str:
    """The build that answered for a service."""
    result = client.generate("aaaa", max_tokens=max_tokens, service=name, extra_inputs={"end_id": -1})
    assert result.usage.num_output_tokens == max_tokens
    return str(result.build_id)


def test_services_take_turns_in_a_budget_for_one(server: RunningServer, client: Client, builds: list[Path]) -> None:
    """Each first request loads its engine and unloads the idle other; the release in production is not touched."""
    services = [service("alpha", builds[0]), service("beta", builds[1])]
    publish(server, services)

    for _ in range(2):
        assert ask(client, "alpha") == services[0].build_id
        assert resident(server) == {"alpha"}
        assert ask(client, "beta") == services[1].build_id
        assert resident(server) == {"beta"}
    assert client.generate("aaaa", max_tokens=4).usage.num_output_tokens == 4


def test_requests_of_both_at_once_are_all_answered(server: RunningServer, builds: list[Path]) -> None:
    """Mixed traffic over a budget for one: every request is answered by its own build, and never are both loaded."""
    services = [service("alpha", builds[0]), service("beta", builds[1])]
    expected = {each.name: each.build_id for each in services}
    publish(server, services, max_wait_s=60.0)
    wrong: list[object] = []
    most = 0

    def ask_some(seed: int) -> None:
        rng = random.Random(seed)
        with Client(server.grpc_url, max_retries=0) as client:
            for _ in range(6):
                name = rng.choice(sorted(expected))
                try:
                    build_id = ask(client, name, rng.randint(1, 100))
                    wrong.extend([] if build_id == expected[name] else [(name, build_id)])
                except EnginehouseError as error:
                    wrong.append(error)

    threads = [threading.Thread(target=ask_some, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, len(resident(server)))
        time.sleep(0.05)

    assert wrong == []
    assert most == 1


def test_idle_engines_go_and_pinned_ones_come_and_stay(
    server: RunningServer, client: Client, builds: list[Path]
) -> None:
    """A pinned service loads without a request; the other leaves when it was not used for a while."""
    services = [service("alpha", builds[0]), service("beta", builds[1], is_pinned=True)]
    publish(server, services, budget=2.5 * SIZE, idle_unload_s=1.0)

    wait_until(lambda: resident(server) == {"beta"})
    ask(client, "alpha")
    wait_until(lambda: resident(server) == {"beta"})
    publish(server, [])
    wait_until(lambda: resident(server) == set())

    with pytest.raises(InvalidRequestError, match="`service` names no service"):
        ask(client, "alpha")


def test_a_service_that_cannot_load_says_why(server: RunningServer, client: Client, builds: list[Path]) -> None:
    """The engine's own words reach the client, the next request hears when it is tried again, others are served."""
    broken = service("broken", builds[0])
    broken = replace(broken, parameters={**broken.parameters, "max_beam_width": "4"})
    publish(server, [broken, service("beta", builds[1])])

    with pytest.raises(EngineUnavailableError, match="max_beam_width"):
        ask(client, "broken")
    with pytest.raises(OverloadedError) as caught:
        ask(client, "broken")

    assert caught.value.retry_after_s is not None
    assert ask(client, "beta")


def stub_of(server: RunningServer, engine: str) -> int:
    """The process that runs an engine."""
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = cmdline.read_bytes()
            if str(server.settings.home).encode() in text and f"/{engine}/".encode() in text:
                return int(cmdline.parent.name)
    raise AssertionError("no such process")


@pytest.mark.model
def test_an_engine_that_died_is_loaded_anew(server: RunningServer, client: Client, smollm2_build: Path) -> None:
    """Streams end with an error; the next request is answered by a fresh engine, which goes and comes as before."""
    mortal = service("mortal", smollm2_build)
    other = replace(mortal, name="other")
    publish(server, [mortal, other])
    errors: list[EnginehouseError] = []
    started = threading.Semaphore(0)

    def stream() -> None:
        with Client(server.grpc_url, max_retries=0) as own:
            try:
                for _ in own.generate_stream(
                    "Count: one, two,", max_tokens=800, service="mortal", extra_inputs={"end_id": -1}
                ):
                    started.release()
            except EnginehouseError as error:
                errors.append(error)

    threads = [threading.Thread(target=stream) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert started.acquire(timeout=60)
    os.kill(stub_of(server, mortal.engine_model), signal.SIGKILL)
    for thread in threads:
        thread.join(60)

    assert [type(error) for error in errors] == [EngineUnavailableError] * 2
    for name in ("mortal", "other", "mortal"):
        answer = client.generate("The capital of France is", max_tokens=4, service=name)
        assert answer.text.startswith(" Paris")
        assert resident(server) == {name}
