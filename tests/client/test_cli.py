"""The command `enginehouse`: help, JSON, error lines and exit codes; servers are scripted ones."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.scripted_servers import (
    GUARD_S,
    Failure,
    ScriptedServer,
    Text,
    WaitUntilClientLeaves,
    scripted_server,
)
from typer.testing import CliRunner

from enginehouse_backends.server import supervisor
from enginehouse_backends.server.binary import Check
from enginehouse_cli import console
from enginehouse_cli.main import app, run
from enginehouse_contract import errors
from enginehouse_contract.manifest import MANIFEST_FILE, BuildLimits, FileRecord, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMMANDS = ("build", "builds", "serve", "generate", "chat", "demo", "doctor", "usage", "cost", "budget", "prices")


class Cli:
    """Runs the command in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        code = run(list(arguments))
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command, over a state folder of its own."""
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path))
    return Cli(capsys)


def give_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Pipe *data* into the command."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    """Each has help text that names its options."""
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})

    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert "--help" in result.output


@pytest.mark.parametrize("command", ["build", "builds", "serve", "generate", "chat", "demo", "doctor", "usage", "cost"])
def test_every_command_speaks_json(command: str) -> None:
    """`--json` is everywhere."""
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})

    assert "--json" in result.output


def test_no_command_is_help_and_wrong_usage(cli: Cli) -> None:
    """Without arguments the help is shown, and nothing else."""
    assert cli() == 2
    assert "generate" in cli.out
    assert cli.err == ""


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate"], "prompt"),
        (["nonsense"], "nonsense"),
        (["generate", "x", "--nope"], "--nope"),
        (["generate", "x", "--max-tokens", "many"], "max-tokens"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(cli: Cli, arguments: list[str], word: str) -> None:
    """Says what is wrong with the command line."""
    assert cli(*arguments) == 2
    assert cli.err.startswith("error: ")
    assert cli.err.count("\n") == 1
    assert word in cli.err.lower()
    assert cli.out == ""


def test_help_is_fast_because_commands_import_what_they_use() -> None:
    """Nothing heavy is imported before a command runs."""
    heavy = ("numpy", "grpc", "aiohttp", "openvino", "sqlalchemy", "tokenizers", "enginehouse_client")
    script = f"import sys, enginehouse_cli.main; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603

    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequestError("x"), 1),
        (errors.ConfigurationError("x"), 1),
        (errors.BudgetExceededError("x"), 1),
        (errors.ServerStartError("x"), 1),
        (errors.ServerUnreachableError("x"), 3),
        (errors.OverloadedError("x"), 3),
        (errors.DeadlineExceededError("x"), 3),
        (errors.LedgerUnavailableError("x"), 3),
    ],
)
def test_exit_codes_are_stable(error: errors.EnginehouseError, code: int) -> None:
    """Refused or failed is 1, nobody to answer is 3."""
    assert console.exit_code_of(error) == code


@pytest.mark.parametrize(
    ("setting", "word"), [("ENGINEHOUSE_HOM", "did you mean ENGINEHOUSE_HOME"), ("ENGINEHOUSE_ACCOUNTING", "on or off")]
)
def test_bad_settings_are_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, setting: str, word: str) -> None:
    """An unknown name and a bad value, with what is known."""
    monkeypatch.setenv(setting, "x")

    assert cli("builds") == 1
    assert cli.err.startswith("error: ")
    assert word in cli.err
    assert cli.err.count("\n") == 1


def test_an_unexpected_error_leaves_a_log_and_no_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line says where the details are."""

    def fail(_home: Path) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(supervisor, "read_state", fail)

    assert cli("generate", "x") == 1
    (log,) = (tmp_path / "logs").glob("crash-*.log")
    assert cli.err == f"error: internal error (RuntimeError); the details are in {log}. Please report it.\n"
    assert "secret detail" in log.read_text()


def test_a_folder_that_cannot_be_written_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The system's own words with the path, not a traceback."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "file"))

    assert cli("demo") == 1
    assert cli.err.splitlines()[-1].startswith("error: ")
    assert str(tmp_path / "file") in cli.err
    assert "Traceback" not in cli.err


def test_an_interrupt_exits_with_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no error and shows no traceback."""

    def interrupt(_home: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "read_state", interrupt)

    assert cli("generate", "x") == 130
    assert cli.err.strip() == ""


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    """Each protocol."""
    return str(request.param)


def sent(server: ScriptedServer) -> dict[str, Any]:
    """The last request of a scripted HTTP server."""
    last: dict[str, Any] = server.requests[-1]
    return last


@pytest.mark.parametrize("flag", [[], ["--stream"]])
def test_generate_prints_the_answer(cli: Cli, protocol: str, flag: list[str]) -> None:
    """On stdout, with one line end, and nothing on stderr."""
    with scripted_server(protocol, [Text("an answer", is_final=True)]) as server:
        assert cli("generate", "hi", "--url", server.url, *flag) == 0

    assert cli.out == "an answer\n"
    assert cli.err == ""


def test_generate_as_json_is_one_object(cli: Cli, protocol: str) -> None:
    """With and without --stream."""
    with scripted_server(protocol, [Text("a", is_final=True)]) as server:
        for flags in (["--json"], ["--json", "--stream"]):
            assert cli("generate", "hi", "--url", server.url, *flags) == 0
            answer = json.loads(cli.out)
            assert set(answer) == {"request_id", "build_id", "seconds", "sequences", "cost", "energy"}
            assert answer["sequences"][0]["text"] == "a"


def test_generate_passes_every_flag_on(cli: Cli) -> None:
    """Each flag is an input of the request."""
    with scripted_server("http", [Text("a")]) as server:
        flags = "--max-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.5 --seed 7 --stop x --stop y --bad-word z"
        flags += " --min-tokens 2 --repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty 0.25 --n 2"
        flags += " --speculate off --log-probs"
        assert cli("generate", "hi", "--url", server.url, *flags.split()) == 0
        request = sent(server)

    assert request.pop("id")
    assert request == {
        "text_input": "hi",
        "stream": False,
        "exclude_input_in_output": True,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "seed": 7,
        "stop_words": ["x", "y"],
        "bad_words": ["z"],
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_return_sequences": 2,
        "speculate": "off",
        "return_log_probs": True,
    }


def test_a_prompt_may_come_from_a_pipe(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads stdin; what is not UTF-8 is refused in words."""
    with scripted_server("http", [Text("a")]) as server:
        give_stdin(monkeypatch, "grüß\n".encode())
        assert cli("generate", "-", "--chat", "--url", server.url) == 0
        assert json.loads(sent(server)["messages"]) == [{"role": "user", "content": "grüß\n"}]

        give_stdin(monkeypatch, b"\xff")
        assert cli("generate", "-", "--url", server.url) == 1
        assert cli.err == "error: the input is not valid UTF-8 at byte 0.\n"


@pytest.mark.parametrize(
    ("failure", "code"), [(Failure("`top_p` is bad."), 1), (Failure("the server is full", 503), 3)]
)
def test_a_servers_refusal_is_one_line(cli: Cli, protocol: str, failure: Failure, code: int) -> None:
    """The server's words, and the exit code of their kind."""
    with scripted_server(protocol, [failure]) as server:
        assert cli("generate", "hi", "--url", server.url) == code

    assert cli.err == f"error: {failure.message}\n"
    assert cli.out == ""


def test_nobody_there_is_exit_code_3(cli: Cli, tmp_path: Path) -> None:
    """With what to do about it."""
    assert cli("generate", "hi") == 3
    assert cli.err == (
        f"error: no server runs on {tmp_path}; start one with `enginehouse serve`, or name one with --url.\n"
    )
    assert cli("generate", "hi", "--url", "127.0.0.1:1") == 3
    assert cli.err.startswith("error: no server answers gRPC at 127.0.0.1:1 (Connection refused)")
    assert cli("generate", "hi", "--url", "localhost") == 1
    assert "must be host:port for gRPC" in cli.err


def test_chat_sends_what_was_said_before(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn carries the conversation; --json prints it at its end."""
    give_stdin(monkeypatch, b"one\ntwo\n\nnot read\n")
    with scripted_server("http", [Text("yes")]) as server:
        assert cli("chat", "--system", "be kind", "--url", server.url) == 0
        assert cli.out == "yes\nyes\n"
        said = json.loads(sent(server)["messages"])

        give_stdin(monkeypatch, b"one")
        assert cli("chat", "--json", "--url", server.url) == 0

    assert [(message["role"], message["content"]) for message in said] == [
        ("system", "be kind"),
        ("user", "one"),
        ("assistant", "yes"),
        ("user", "two"),
    ]
    assert json.loads(cli.out)["messages"][1] == {"role": "assistant", "content": "yes"}


def test_a_refused_turn_of_a_piped_chat_fails_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts see a refusal as an exit code."""
    give_stdin(monkeypatch, b"one\ntwo\n")
    with scripted_server("grpc", [Failure("`messages` is bad.")]) as server:
        assert cli("chat", "--url", server.url) == 1

    assert cli.err == "error: `messages` is bad.\n"


@pytest.mark.parametrize("arguments", [["generate", "hi", "--stream"], ["generate", "hi"], ["chat"]])
def test_ctrl_c_cancels_on_the_server_and_exits_with_130(protocol: str, arguments: list[str], tmp_path: Path) -> None:
    """For real: a process, a signal, and a server that sees its client leave."""
    script = [WaitUntilClientLeaves()] if arguments == ["generate", "hi"] else [Text("a"), WaitUntilClientLeaves()]
    with scripted_server(protocol, script) as server:
        command = [sys.executable, "-c", "from enginehouse_cli.main import main; main()", *arguments]
        process = subprocess.Popen(  # noqa: S603 - our own command
            [*command, "--url", server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "ENGINEHOUSE_HOME": str(tmp_path)},
        )
        assert process.stdin is not None
        process.stdin.write(b"hi\n")
        process.stdin.flush()
        assert server.asked.wait(GUARD_S)
        if len(script) > 1:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=GUARD_S)

        assert server.client_left.wait(GUARD_S)
    assert process.returncode == 130
    assert told.decode().strip() == ""


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """`enginehouse ... | head -1` ends quietly."""
    script = f"{sys.executable} -c 'from enginehouse_cli.main import main; main()' generate --help | true"
    done = subprocess.run(  # noqa: S602 - a pipe is what is tested
        script,
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ENGINEHOUSE_HOME": str(tmp_path)},
    )

    assert done.stderr == ""


def test_doctor_shows_checks_and_fails_where_one_does(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """As text with advice, as JSON with the same facts."""
    checks = [Check("first", ok=True, found="here"), Check("second", ok=False, found="none", advice="Get one.")]
    monkeypatch.setattr("enginehouse_backends.server.binary.diagnose", lambda: checks)

    assert cli("doctor") == 1
    assert "Get one." in cli.out
    assert cli("doctor", "--json") == 1
    assert [(check["name"], check["ok"]) for check in json.loads(cli.out)] == [
        ("first", True),
        ("second", False),
        ("state folder", True),
    ]


def test_builds_are_listed(cli: Cli, make_build: Callable[[], Manifest]) -> None:
    """None is said so; one is a row, or an object."""
    assert cli("builds") == 0
    assert "no builds yet" in cli.out
    assert cli("builds", "--json") == 0
    assert json.loads(cli.out) == []

    manifest = make_build()
    assert cli("builds", "--json") == 0
    (build,) = json.loads(cli.out)
    assert build["build_id"] == manifest.build_id
    assert build["num_bytes"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "missing.gguf"], "missing.gguf does not exist"),
        (["build", "x", "--weights", "int3"], "`weight_precision` must be one of"),
        (["serve"], "there is no build in"),
        (["serve", "nope"], "no build is called `nope`"),
        (["serve", "--parameter", "x"], "`--parameter` must be NAME=VALUE"),
    ],
)
def test_refusals_of_build_and_serve_are_one_line(cli: Cli, arguments: list[str], message: str) -> None:
    """What is wrong, and exit code 1."""
    assert cli(*arguments) == 1
    assert cli.err.splitlines()[-1].startswith("error: ")
    assert message in cli.err


def test_a_second_server_leaves_the_first_ones_repository_alone(
    cli: Cli, make_build: Callable[[], Manifest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Refused before anything is written."""
    make_build()
    running = supervisor.ServerState(1, 2, 3, 4, "sha256:b", "log")
    monkeypatch.setattr(supervisor, "read_state", lambda _home: running)

    assert cli("serve") == 1
    assert "a server already runs on" in cli.err
    assert not (tmp_path / "repository").exists()


@pytest.fixture
def make_build(tmp_path: Path) -> Callable[[], Manifest]:
    """Return a function that puts a build into the store; its files are not those of a model."""

    def make() -> Manifest:
        build_dir = tmp_path / "store" / "sha256-0123"
        build_dir.mkdir(parents=True)
        manifest = Manifest(
            build_id=f"sha256:{'0' * 64}",
            target="cpu",
            model_name="small",
            source={"kind": "gguf", "name": "small.gguf", "sha256": "0" * 64},
            weight_precision="int8",
            kv_precision="u8",
            limits=BuildLimits(1, 2, 3, 4),
            tool_versions={},
            tokenizer_sha256="0" * 64,
            chat_template_sha256=None,
            files={"weights": FileRecord(5, "0" * 64)},
        )
        (build_dir / MANIFEST_FILE).write_text(manifest.to_json())
        return manifest

    return make
