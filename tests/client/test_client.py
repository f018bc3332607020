"""The clients over all four transports, against real gRPC and HTTP servers that follow a script."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.scripted_servers import (
    GUARD_S,
    NUM_WORKERS,
    Drop,
    Failure,
    Final,
    Pause,
    ScriptedServer,
    Text,
    WaitUntilClientLeaves,
    scripted_server,
)

from enginehouse_client import AsyncClient, Client, Deadline, GenerationChunk, GenerationResult, ModelState
from enginehouse_client._client import pause_before_retry
from enginehouse_contract.errors import (
    BudgetExceededError,
    ConfigurationError,
    DeadlineExceededError,
    EngineFailureError,
    EnginehouseError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    ServerUnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from enginehouse_client._request import GenerationRequest


class Blocking:
    """Asks through :class:`Client`."""

    def generate(self, url: str, prompt: str = "hi", *, max_retries: int = 2, **options: Any) -> GenerationResult:
        with Client(url, max_retries=max_retries) as client:
            return client.generate(prompt, **options)

    def texts(self, url: str, **options: Any) -> list[str]:
        with Client(url) as client:
            return [chunk.text for chunk in client.generate_stream("hi", **options)]

    def leave_after_first(self, url: str) -> None:
        with Client(url) as client:
            chunks = client.generate_stream("hi")
            next(chunks)
            chunks.close()

    def state(self, url: str) -> tuple[bool, bool, bool, tuple[ModelState, ...]]:
        with Client(url) as client:
            return client.server_ready(), client.model_ready("ensemble"), client.model_ready("old"), client.models()


class Async:
    """Asks through :class:`AsyncClient`; made outside of the loop, as users do."""

    def generate(self, url: str, prompt: str = "hi", *, max_retries: int = 2, **options: Any) -> GenerationResult:
        client = AsyncClient(url, max_retries=max_retries)

        async def ask() -> GenerationResult:
            async with client:
                return await client.generate(prompt, **options)

        return asyncio.run(ask())

    def texts(self, url: str, **options: Any) -> list[str]:
        async def ask() -> list[str]:
            async with AsyncClient(url) as client:
                return [chunk.text async for chunk in client.generate_stream("hi", **options)]

        return asyncio.run(ask())

    def leave_after_first(self, url: str) -> None:
        async def ask() -> None:
            async with AsyncClient(url) as client:
                chunks = client.generate_stream("hi")
                await anext(chunks)
                await chunks.aclose()

        asyncio.run(ask())

    def state(self, url: str) -> tuple[bool, bool, bool, tuple[ModelState, ...]]:
        async def ask() -> tuple[bool, bool, bool, tuple[ModelState, ...]]:
            async with AsyncClient(url) as client:
                return (
                    await client.server_ready(),
                    await client.model_ready("ensemble"),
                    await client.model_ready("old"),
                    await client.models(),
                )

        return asyncio.run(ask())


@pytest.fixture(params=[Blocking, Async], ids=["blocking", "async"])
def asker(request: pytest.FixtureRequest) -> Blocking | Async:
    """Each client."""
    asker: Blocking | Async = request.param()
    return asker


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    """Each protocol."""
    return str(request.param)


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("script", [[Text("a"), Text("b"), Final()], [Text("a"), Text("b", is_final=True)]])
def test_the_final_flag_may_come_with_data_or_alone(asker: Blocking | Async, protocol: str, script: list[Any]) -> None:
    """Both ends of a stream give the same chunks, none lost and none added."""
    with scripted_server(protocol, script) as server:
        assert asker.texts(server.url) == ["a", "b"]


def test_a_whole_answer_is_one_result(asker: Blocking | Async, protocol: str) -> None:
    """`generate` collects what comes."""
    with scripted_server(protocol, [Text("whole", is_final=True)]) as server:
        assert asker.generate(server.url).text == "whole"


def test_several_sequences_are_asked_as_a_stream_over_http(asker: Blocking | Async) -> None:
    """`/generate` takes exactly one response, so more are read from a stream."""
    with scripted_server("http", [Text("a"), Text("b")]) as server:
        assert asker.generate(server.url, n=2).text == "ab"


def test_no_client_sends_the_metadata_that_crashes_triton(asker: Blocking | Async) -> None:
    """`triton_grpc_error` makes Triton 2.51 finish a refused call twice, and abort."""
    with scripted_server("grpc", [Text("a", is_final=True)]) as server:
        asker.generate(server.url)

        assert "triton_grpc_error" not in server.metadata[0]


def test_readiness_and_models(asker: Blocking | Async, protocol: str) -> None:
    """The server, single models and the list of models."""
    with scripted_server(protocol, []) as server:
        is_ready, ensemble, old, models = asker.state(server.url)

    assert (is_ready, ensemble, old) == (True, True, False)
    assert models == (ModelState("ensemble", "1", "READY"), ModelState("old", "1", "UNAVAILABLE", "unloaded"))
    assert [model.is_ready for model in models] == [True, False]


def test_nobody_there_is_not_ready_and_has_no_models(protocol: str) -> None:
    """Readiness of a server that is not there is False; its models cannot be listed."""
    address = f"127.0.0.1:{closed_port()}"
    with Client(address if protocol == "grpc" else f"http://{address}") as client:
        assert not client.server_ready()
        with pytest.raises(ServerUnreachableError):
            client.models()


def test_refusals_are_typed(asker: Blocking | Async, protocol: str) -> None:
    """A server's refusal is an error of the tree with its words, and the request is not sent again."""
    with scripted_server(protocol, [Failure("`top_p` is bad.")]) as server:
        with pytest.raises(InvalidRequestError, match=r"^`top_p` is bad\.$"):
            asker.generate(server.url)

        assert len(server.requests) == 1


def test_an_error_after_text_ends_the_stream(asker: Blocking | Async, protocol: str) -> None:
    """What came before is yielded, then the error is raised; nothing is sent again, however safe the error sounds."""
    with scripted_server(protocol, [Text("a"), Failure("the server is full")]) as server:
        with pytest.raises(OverloadedError):
            asker.texts(server.url)

        assert len(server.requests) == 1


def test_a_full_server_is_asked_again_and_then_believed(asker: Blocking | Async, protocol: str) -> None:
    """An overloaded server has started nothing: bounded retries, none where they are turned off."""
    with scripted_server(protocol, [Failure("the server is full", 503)]) as server:
        with pytest.raises(OverloadedError):
            asker.generate(server.url, max_retries=1)
        assert len(server.requests) == 2

        with pytest.raises(OverloadedError):
            asker.generate(server.url, max_retries=0)
        assert len(server.requests) == 3


@pytest.mark.parametrize("before", [[], [Text("a")]])
def test_a_broken_connection_is_never_tried_again(asker: Blocking | Async, protocol: str, before: list[Any]) -> None:
    """Once a request was sent it may have run: it is not sent again, whether an answer began or not."""
    with scripted_server(protocol, [*before, Drop()]) as server:
        with pytest.raises(EngineUnavailableError) as broken:
            asker.texts(server.url)

        assert not isinstance(broken.value, ServerUnreachableError)
        assert len(server.requests) == 1


def test_a_grpc_stream_without_a_final_response_is_incomplete(asker: Blocking | Async) -> None:
    """A stream that just ends was cut: half an answer is not passed off as a whole one."""
    with scripted_server("grpc", [Text("half")]) as server, pytest.raises(EngineUnavailableError, match="complete"):
        asker.texts(server.url)


def test_nobody_there_is_said_after_a_few_tries(asker: Blocking | Async, protocol: str) -> None:
    """A refused connection becomes an error that names the address."""
    address = f"127.0.0.1:{closed_port()}"
    with pytest.raises(ServerUnreachableError, match=f"no server answers.*{address}"):
        asker.generate(address if protocol == "grpc" else f"http://{address}")


def test_a_server_that_comes_up_meanwhile_is_found(asker: Blocking | Async, protocol: str) -> None:
    """A refused connection is tried again, and works once somebody listens."""
    port = closed_port()
    address = f"127.0.0.1:{port}" if protocol == "grpc" else f"http://127.0.0.1:{port}"
    is_done = threading.Event()

    def come_up() -> None:
        time.sleep(0.2)
        with scripted_server(protocol, [Text("a", is_final=True)], port):
            is_done.wait(GUARD_S)

    thread = threading.Thread(target=come_up)
    thread.start()
    try:
        assert asker.generate(address, max_retries=10).text == "a"
    finally:
        is_done.set()
        thread.join()


def test_the_time_limit_covers_the_whole_call(asker: Blocking | Async, protocol: str) -> None:
    """Text that keeps coming does not move the limit; the server sees the client leave."""
    script = [step for _ in range(40) for step in (Text("a"), Pause(0.05))]
    with (
        scripted_server(protocol, [*script, Final()]) as server,
        pytest.raises(DeadlineExceededError, match="timeout_s"),
    ):
        asker.texts(server.url, timeout_s=0.5)


def test_a_silent_server_is_left_in_time(asker: Blocking | Async, protocol: str) -> None:
    """No answer at all: the limit ends it, and the request is cancelled."""
    with scripted_server(protocol, [WaitUntilClientLeaves()]) as server:
        with pytest.raises(DeadlineExceededError):
            asker.generate(server.url, timeout_s=0.3)

        assert server.client_left.wait(GUARD_S)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_time_limit_must_lie_ahead(asker: Blocking | Async, timeout_s: float) -> None:
    """Refused, not taken for no limit."""
    with pytest.raises(InvalidRequestError, match="`timeout_s` must be greater than 0"):
        asker.generate("127.0.0.1:1", timeout_s=timeout_s)


def test_closing_a_stream_cancels_the_request(asker: Blocking | Async, protocol: str) -> None:
    """The server sees the client leave at once."""
    with scripted_server(protocol, [Text("a"), WaitUntilClientLeaves()]) as server:
        asker.leave_after_first(server.url)

        assert server.client_left.wait(GUARD_S)


def test_dropping_a_stream_cancels_the_request(protocol: str) -> None:
    """An iterator that nobody holds any more is as good as closed."""
    with scripted_server(protocol, [Text("a"), WaitUntilClientLeaves()]) as server, Client(server.url) as client:
        chunks = client.generate_stream("hi")
        next(chunks)
        del chunks
        gc.collect()

        assert server.client_left.wait(GUARD_S)


def test_leaving_the_loop_of_an_async_stream_cancels_the_request(protocol: str) -> None:
    """A `break` out of `async for` ends the request while the loop runs on."""

    async def ask(server: ScriptedServer) -> bool:
        async with AsyncClient(server.url) as client:
            async for _ in client.generate_stream("hi"):
                break
            gc.collect()
            return await asyncio.to_thread(server.client_left.wait, GUARD_S)

    with scripted_server(protocol, [Text("a"), WaitUntilClientLeaves()]) as server:
        assert asyncio.run(ask(server))


def test_cancelling_the_task_cancels_the_request(protocol: str) -> None:
    """Asyncio's own way to give up works too."""

    async def ask(server: ScriptedServer) -> bool:
        async with AsyncClient(server.url) as client:
            task = asyncio.create_task(client.generate("hi"))
            await asyncio.to_thread(server.asked.wait, GUARD_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await asyncio.to_thread(server.client_left.wait, GUARD_S)

    with scripted_server(protocol, [WaitUntilClientLeaves()]) as server:
        assert asyncio.run(ask(server))


def test_an_interrupt_cancels_the_request(protocol: str) -> None:
    """An exception in the caller's loop body, Ctrl-C included, leaves no request behind."""

    def ask(client: Client) -> None:
        for _ in client.generate_stream("hi"):
            raise KeyboardInterrupt

    with scripted_server(protocol, [Text("a"), WaitUntilClientLeaves()]) as server, Client(server.url) as client:
        with pytest.raises(KeyboardInterrupt):
            ask(client)
        gc.collect()

        assert server.client_left.wait(GUARD_S)


def test_requests_leave_no_threads_behind(protocol: str) -> None:
    """A client that is used all day does not grow."""
    with scripted_server(protocol, [Text("a", is_final=True)]) as server, Client(server.url) as client:
        client.generate("hi")
        most = threading.active_count() + NUM_WORKERS  # the test server starts its workers one by one
        for _ in range(4 * NUM_WORKERS):
            client.generate("hi")
        deadline_s = time.monotonic() + GUARD_S
        while threading.active_count() > most and time.monotonic() < deadline_s:
            time.sleep(0.01)

        assert threading.active_count() <= most


def test_a_closed_client_says_so(protocol: str) -> None:
    """Use after close is refused in words; closing twice is fine."""
    client = Client("127.0.0.1:1" if protocol == "grpc" else "http://127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(InvalidRequestError, match="this client is closed"):
        client.generate("hi")
    with pytest.raises(InvalidRequestError, match="this client is closed"):
        client.server_ready()


@pytest.mark.parametrize(
    "address", ["", "localhost", "8001", "http://", "ftp://a:1", "a:b", "http://a:1?x", "a b:1", "127.0.0.1:8001/x"]
)
def test_bad_addresses_are_refused_at_once(address: str) -> None:
    """With the two forms that work."""
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigurationError, match="host:port for gRPC or http://host:port for HTTP"):
            kind(address)


@pytest.mark.parametrize("address", ["a:1", "grpc://a:1", "[::1]:8001", "http://a", "https://a:1/prefix/"])
def test_good_addresses_are_taken(address: str) -> None:
    """Host names, IPv6 and a path before Triton's."""
    Client(address).close()


def test_the_wrong_port_is_explained(asker: Blocking | Async) -> None:
    """Asking a gRPC port over HTTP, or the other way round, hints at it."""
    with scripted_server("grpc", []) as server, pytest.raises(EngineUnavailableError, match="gRPC port"):
        asker.generate(f"http://{server.url}", timeout_s=GUARD_S)
    with scripted_server("http", []) as server, pytest.raises(EngineUnavailableError, match=r"gRPC at|went away"):
        asker.generate(server.url.removeprefix("http://"), timeout_s=GUARD_S)


class ScriptedTransport:
    """Fails as told, then answers one chunk: clients take it in place of the network."""

    def __init__(self, *failures: EnginehouseError) -> None:
        self._failures = list(failures)
        self.num_calls = 0

    def stream(self, request: GenerationRequest, deadline: Deadline) -> Generator[GenerationChunk, None, None]:
        self.num_calls += 1
        if self._failures:
            raise self._failures.pop(0)
        yield GenerationChunk("done")

    def is_ready(self, model: str | None, timeout_s: float) -> bool:
        return True

    def models(self, timeout_s: float) -> tuple[ModelState, ...]:
        return ()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("failures", "num_calls"),
    [
        ([], 1),
        ([ServerUnreachableError("nobody")], 2),
        ([ServerUnreachableError("nobody"), OverloadedError("full")], 3),
    ],
)
def test_retries_end_in_success(failures: list[EnginehouseError], num_calls: int) -> None:
    """What cannot have started is tried again."""
    transport = ScriptedTransport(*failures)

    assert Client("a:1", transport=transport).generate("hi").text == "done"
    assert transport.num_calls == num_calls


@pytest.mark.parametrize(
    "failure",
    [
        EngineUnavailableError("broke"),
        EngineFailureError("failed"),
        DeadlineExceededError("late"),
        BudgetExceededError("`budget` is used up."),
        InvalidRequestError("bad"),
    ],
)
def test_what_may_have_started_or_cannot_help_is_not_tried_again(failure: EnginehouseError) -> None:
    """The error comes through after one call."""
    transport = ScriptedTransport(failure)
    with pytest.raises(type(failure)):
        Client("a:1", transport=transport).generate("hi")

    assert transport.num_calls == 1


def test_pauses_grow_and_are_bounded() -> None:
    """Doubling from a tenth of a second to two; a server's hint counts within the same bound."""
    unreachable = ServerUnreachableError("nobody")

    assert [pause_before_retry(unreachable, attempt, 9) for attempt in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert pause_before_retry(OverloadedError("full", retry_after_s=1.5), 0, 9) == 1.5
    assert pause_before_retry(OverloadedError("full", retry_after_s=60.0), 0, 9) == 2.0
    assert pause_before_retry(unreachable, 2, 2) is None


def test_no_pause_outlives_the_time_limit() -> None:
    """Where the limit would pass during the pause, the error is raised instead."""
    transport = ScriptedTransport(OverloadedError("full", retry_after_s=2.0))
    with pytest.raises(OverloadedError):
        Client("a:1", transport=transport).generate("hi", timeout_s=1.0)

    assert transport.num_calls == 1


@pytest.fixture(autouse=True)
def _no_thread_is_left_running() -> Iterator[None]:
    """Collect what a test dropped, so that its warnings belong to it."""
    yield
    gc.collect()
