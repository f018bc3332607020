"""`enginehouse bench` against scripted servers: what is sent, what is recorded, and how it fails."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.scripted_servers import (
    Drop,
    Failure,
    Final,
    ScriptedServer,
    Text,
    WaitUntilClientLeaves,
    scripted_server,
)
from typer.testing import CliRunner

from enginehouse_builders.bench.lengths import parse_lengths
from enginehouse_builders.bench.workload import Workload, plan_requests
from enginehouse_cli.bench_driver import LoadDriver
from enginehouse_cli.main import app, run
from enginehouse_client import GenerationChunk, Usage
from enginehouse_contract.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from enginehouse_builders.bench.records import RequestRecord

ANSWER = (Text("a"), Text("b"), Text("c"), Final())


class Cli:
    """Runs the command in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        code = run(["bench", *arguments])
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command, over a state folder of its own."""
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path))
    return Cli(capsys)


@pytest.fixture(params=["grpc", "http"])
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    """A server of either protocol that answers three tokens."""
    with scripted_server(request.param, ANSWER) as server:
        yield server


def ask(server: ScriptedServer, *arguments: str) -> tuple[str, ...]:
    """Return arguments for a small run against a scripted server, which knows the model `ensemble`."""
    return "--url", server.url, "--model", "ensemble", "--num-requests", "6", "--warmup", "2", *arguments


def test_a_run_measures_prints_and_writes(cli: Cli, server: ScriptedServer, tmp_path: Path) -> None:
    """Over both protocols: six requests after two of warm-up, as text, as JSON and as a page."""
    result, page = tmp_path / "run.json", tmp_path / "run.html"

    assert cli(*ask(server, "--output", str(result), "--report", str(page), "--slo", "ttft=10s")) == 0

    assert "6 complete, 0 failed, 0 cancelled" in cli.out
    assert "after 2 of warm-up" in cli.out
    assert len(server.requests) == 8
    values = json.loads(result.read_text())
    assert (values["format"], values["format_version"]) == ("enginehouse-bench", 1)
    assert [len(record["piece_at_s"]) for record in values["requests"]] == [3] * 8
    assert (values["figures"]["ttft_s"]["count"], values["figures"]["slo_share"]) == (6, 1.0)
    assert values["environment"]["protocol"] in {"grpc", "http"}
    assert page.read_text().startswith("<!doctype html>")


def test_json_goes_to_stdout_alone(cli: Cli, server: ScriptedServer) -> None:
    """`--json` prints the result without single requests; progress is on stderr."""
    assert cli(*ask(server, "--json", "--rate", "200", "--machine-hour", "0.40")) == 0

    values = json.loads(cli.out)
    assert "requests" not in values
    assert (values["loop"], values["parameters"]["rate_per_s"]) == ("open", 200.0)
    assert values["figures"]["cost_of_machine"]["currency"] == "USD"
    assert "measuring" in cli.err


def test_a_duration_ends_a_closed_loop(cli: Cli) -> None:
    """Whoever is in flight at the end is waited for; nothing new is sent."""
    with scripted_server("grpc", ANSWER) as server:
        code = cli("--url", server.url, "--model", "ensemble", "--duration", "0.3", "--concurrency", "2", "--json")

    values = json.loads(cli.out)
    assert code == 0
    assert values["figures"]["window_s"] == pytest.approx(0.3)
    assert values["figures"]["num_requests"] == len(server.requests) - values["figures"]["num_warmup"]


def test_a_trace_is_sent_as_it_is(cli: Cli, tmp_path: Path) -> None:
    """Prompts and limits of the trace reach the server; its times make the loop open."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "prompt": "first", "max_tokens": 3}\n{"at": 0.05, "prompt": "second"}\n')
    with scripted_server("http", ANSWER) as server:
        assert cli("--url", server.url, "--model", "ensemble", "--trace", str(trace), "--json") == 0

    assert [request["text_input"] for request in server.requests] == ["first", "second"]
    assert [request["max_tokens"] for request in server.requests] == [3, 64]
    assert json.loads(cli.out)["loop"] == "open"


def test_answers_have_their_full_length_unless_told_otherwise(cli: Cli) -> None:
    """No end token by default, so that runs compare; the model's own with `--stop-at-end`."""
    with scripted_server("http", ANSWER) as server:
        assert cli(*ask(server)) == 0
        assert cli(*ask(server, "--stop-at-end")) == 0

    assert [request.get("end_id") for request in server.requests] == [-1] * 8 + [None] * 8


@pytest.mark.parametrize(
    ("script", "kind"),
    [((Failure("no room left"),), "EngineFailureError"), ((Text("a"), Drop()), "EngineUnavailableError")],
)
def test_a_run_of_failures_says_so_and_fails(cli: Cli, script: Any, kind: str) -> None:
    """Errors by kind with an example, and exit code 1; nobody retries behind the measurement."""
    with scripted_server("grpc", script) as server:
        assert cli(*ask(server)) == 1

    assert "0 complete, 6 failed" in cli.out
    assert f"failed: {kind}" in cli.out
    assert len(server.requests) == 8


def test_cancelled_requests_leave_the_server(cli: Cli) -> None:
    """A request that is cancelled on purpose is cancelled on the wire, too, and is no failure."""
    with scripted_server("grpc", (Text("a"), Text("b"), WaitUntilClientLeaves())) as server:
        assert cli(*ask(server, "--cancel-share", "1", "--output-tokens", "3", "--concurrency", "1")) == 0
        assert server.client_left.wait(10)

    assert "0 complete, 0 failed, 6 cancelled" in cli.out


def test_nobody_there_is_exit_code_3(cli: Cli) -> None:
    """No server, or a server without that model: one line, before anything is sent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert cli("--url", f"127.0.0.1:{port}") == 3
    assert cli.err.splitlines()[-1].startswith(f"error: no server answers at 127.0.0.1:{port}")
    with scripted_server("grpc", ANSWER) as server:
        assert cli("--url", server.url, "--model", "other") == 3
    assert "no model `other`" in cli.err
    assert cli() == 3
    assert "enginehouse serve" in cli.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--rate", "-1"), "`rate`"),
        (("--rate", "1", "--concurrency", "2"), "exclude each other"),
        (("--concurrency", "0"), "`concurrency`"),
        (("--num-requests", "0"), "`num_requests`"),
        (("--input-tokens", "zipf:2"), "unknown distribution"),
        (("--trace", "missing.jsonl"), "missing.jsonl: the trace cannot be read"),
        (("--slo", "fast"), "`slo`"),
        (("--machine-hour", "cheap"), "`machine_hour`"),
        (("--output", "no/such/folder/run.json"), "No such file"),
        (("compare", "a.json", "b.json"), "a.json: cannot be read"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_sent(cli: Cli, arguments: tuple[str, ...], word: str) -> None:
    """Exit code 1, what is wrong by name, no traceback; no server is needed to find out."""
    assert cli(*arguments) == 1
    assert cli.err.startswith("error: ")
    assert cli.err.count("\n") == 1
    assert word in cli.err


def test_a_bad_trace_line_is_named(cli: Cli, tmp_path: Path) -> None:
    """File and line."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0}\n{"at": "soon"}\n')

    assert cli("--trace", str(trace)) == 1
    assert f"{trace}:2: `at` must be" in cli.err


def test_results_are_compared_and_shown(cli: Cli, tmp_path: Path) -> None:
    """Two runs of one server, as text and as JSON; a page from a result; a result without requests is refused."""
    a, b, page = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "page.html"
    with scripted_server("grpc", ANSWER) as server:
        assert cli(*ask(server, "--output", str(a))) == 0
        assert cli(*ask(server, "--output", str(b), "--seed", "1")) == 0

    assert cli("compare", str(a), str(b)) == 0
    assert "ttft p50, ms" in cli.out
    assert "differs: seed: 0 and 1" in cli.out
    assert cli("compare", str(a), str(b), "--json") == 0
    assert json.loads(cli.out)["metrics"][0]["name"] == "ttft_p50"
    assert cli("report", str(a), str(page)) == 0
    assert "</svg>" in page.read_text()
    with scripted_server("grpc", ANSWER) as server:
        assert cli(*ask(server, "--output", str(a), "--no-requests")) == 0
    assert cli("compare", str(a), str(b)) == 1
    assert "--no-requests" in cli.err


@pytest.mark.parametrize("command", [[], ["compare"], ["report"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    """Help names the options or the files."""
    result = CliRunner().invoke(app, ["bench", *command, "--help"], env={"COLUMNS": "200"})

    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert "(default: 4)" in result.output or command


class FakeClient:
    """Answers two tokens; holds up the whole generator before the first of each, or refuses."""

    def __init__(self, *, stall_s: float = 0.0, is_full: bool = False) -> None:
        self._stall_s = stall_s
        self._is_full = is_full
        self.in_flight = self.max_in_flight = 0

    async def generate_stream(self, prompt: str, **_: Any) -> AsyncIterator[GenerationChunk]:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if self._is_full:
                raise OverloadedError("full")
            time.sleep(self._stall_s)  # noqa: ASYNC251 - a generator that cannot keep up
            yield GenerationChunk("a")
            await asyncio.sleep(0)
            yield GenerationChunk("b", usage=Usage(3, 0, 7), finish_reason="length")
        finally:
            self.in_flight -= 1


def drive(client: FakeClient, **values: Any) -> tuple[RequestRecord, ...]:
    """Run a workload through the driver alone."""
    workload = Workload(parse_lengths("4", "i"), parse_lengths("2", "o"), **values)
    driver = LoadDriver(client, workload, "m", {}, 5.0, lambda *_: None)  # type: ignore[arg-type]
    records, _ = asyncio.run(driver.run())
    return records


def test_latency_counts_from_the_intended_time_even_when_sending_is_late() -> None:
    """Ten requests due within 10 ms through a generator that stalls 20 ms each: the last shows all the waiting."""
    values = {"rate_per_s": 1000.0, "burstiness": 0.0, "num_requests": 10}
    records = drive(FakeClient(stall_s=0.02), **values)
    planned = plan_requests(Workload(parse_lengths("4", "i"), parse_lengths("2", "o"), **values))

    assert [record.intended_at_s for record in records] == [request.at_s for request in planned]
    assert all(record.intended_at_s <= record.sent_at_s for record in records)
    last = records[-1]
    assert last.ttft_s is not None
    assert last.ttft_s >= 10 * 0.02 - 0.01 - 0.001


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_its_concurrency(concurrency: int) -> None:
    """As many in flight as asked for, never more, and every request once."""
    client = FakeClient()
    records = drive(client, concurrency=concurrency, num_requests=20, num_warmup_requests=2)

    assert client.max_in_flight == concurrency
    assert [record.index for record in records] == list(range(22))


def test_a_record_has_the_servers_counts() -> None:
    """Tokens by the server's count, not by the pieces that came."""
    (record,) = drive(FakeClient(), concurrency=1, num_requests=1)

    assert (record.num_input_tokens, record.num_output_tokens, len(record.piece_at_s)) == (3, 7, 2)
    assert (record.finish_reason, record.is_complete) == ("length", True)


def test_a_refusal_is_a_result() -> None:
    """Its kind and words are kept, and the run goes on."""
    records = drive(FakeClient(is_full=True), concurrency=2, num_requests=4)

    assert [(record.error_kind, record.error) for record in records] == [("OverloadedError", "full")] * 4


def test_a_bug_ends_the_run_and_is_not_swallowed() -> None:
    """What is no error of our tree comes out, and nothing is left running."""

    class Broken(FakeClient):
        def generate_stream(self, prompt: str, **_: Any) -> AsyncIterator[GenerationChunk]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        drive(Broken(), concurrency=2, num_requests=4)
