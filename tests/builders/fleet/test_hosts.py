"""Hosts reached by commands: how they are named, and what their answers and failures become."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from enginehouse_builders.fleet.hosts import CommandHost, parse_host, read_hosts
from enginehouse_builders.fleet.rollout import Serving
from enginehouse_contract.errors import ConfigurationError, EngineUnavailableError, PromotionError

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """\
import json, sys
answers = json.load(open({answers!r}))
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
code, out, err = answers[sys.argv[1]]
print(out)
print(err, file=sys.stderr)
sys.exit(code)
"""


def scripted(tmp_path: Path, **answers: tuple[int, str, str]) -> CommandHost:
    """A host whose `enginehouse` answers each command with a status, an output and errors."""
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    script = tmp_path / "enginehouse.py"
    script.write_text(SCRIPT.format(answers=str(tmp_path / "answers.json"), log=str(tmp_path / "log")))
    return CommandHost("host", (sys.executable, str(script)), timeout_s=20)


def test_what_is_in_production_is_asked(tmp_path: Path) -> None:
    """The stage's row becomes what the host serves; nothing in production is nothing."""
    row = json.dumps({"production": {"release": "r3", "build_id": "sha256:aa", "state": "loaded"}})

    assert scripted(tmp_path, stage=(0, row, "")).serving() == Serving("r3", "sha256:aa")
    assert scripted(tmp_path, stage=(0, '{"production": null}', "")).serving() == Serving("", "")


def test_a_url_is_pulled_there_its_gates_run_and_the_id_promoted(tmp_path: Path) -> None:
    """What each host promotes is the id that it pulled, with the options as given."""
    row = json.dumps({"release": "r4", "build_id": "sha256:bb"})
    host = scripted(tmp_path, builds=(0, '{"build_id": "sha256:bb"}', ""), gate=(0, "{}", ""), promote=(0, row, ""))

    assert host.promote("s3://engines/builds/small", ["--why=a reason"], with_gates=True) == Serving("r4", "sha256:bb")
    assert (tmp_path / "log").read_text().splitlines() == [
        "builds pull s3://engines/builds small --json",
        "gate sha256:bb --json",
        "promote sha256:bb --why=a reason --json",
    ]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(1, PromotionError), (2, PromotionError), (3, EngineUnavailableError), (255, EngineUnavailableError)],
)
def test_failures_keep_the_hosts_own_words(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    """The last line of its errors, and whether nobody answered or it refused."""
    host = scripted(tmp_path, promote=(code, "", "promote: loading\nerror: its gates never ran."))

    with pytest.raises(kind, match=r"^its gates never ran\.$"):
        host.promote("small")


def test_other_output_is_no_answer(tmp_path: Path) -> None:
    """A host with another version, or a banner on stdout, is refused rather than believed."""
    with pytest.raises(PromotionError, match="answered no JSON object"):
        scripted(tmp_path, rollback=(0, "Welcome!", "")).rollback()


def test_a_command_that_is_not_there_and_one_that_hangs_are_unreachable() -> None:
    """Neither is a traceback, and neither hangs."""
    with pytest.raises(EngineUnavailableError, match="cannot be run"):
        CommandHost("x", ("/no/such/command",)).serving()
    with pytest.raises(EngineUnavailableError, match=r"no answer to `enginehouse rollback` in 0\.2 s"):
        CommandHost("x", (sys.executable, "-c", "import time; time.sleep(30)"), timeout_s=0.2).rollback()


def test_servers_are_folders_or_ssh(tmp_path: Path) -> None:
    """A folder is a state folder of this host; ssh never asks for a password, and quotes what a shell would read."""
    here = parse_host(str(tmp_path), ["enginehouse"])
    there = parse_host("ssh://serving@gpu1:2222/var/lib/engine house", ["enginehouse"])

    assert here.command == ("env", f"ENGINEHOUSE_HOME={tmp_path}", "enginehouse")
    assert there.name == "serving@gpu1"
    assert there.command == (
        "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-p", "2222", "--", "serving@gpu1",
        "env", "'ENGINEHOUSE_HOME=/var/lib/engine house'", "enginehouse",
    )  # fmt: skip
    assert there.is_shell
    assert parse_host("ssh://gpu1", ["x"]).command[-2:] == ("gpu1", "enginehouse")


@pytest.mark.parametrize(
    "text", ["/no/such/folder", "http://host", "ssh://", "ssh://host:port", "ssh://-oProxyCommand=x"]
)
def test_other_servers_are_refused(text: str) -> None:
    """One line that says what a server may be."""
    with pytest.raises(ConfigurationError, match="--server"):
        parse_host(text, ["enginehouse"])


def test_a_file_of_servers(tmp_path: Path) -> None:
    """Text as with --server, or any command that runs another one on the host."""
    file = tmp_path / "fleet.yaml"
    file.write_text(
        f"servers:\n- {tmp_path}\n- {{name: pod, run: [kubectl, exec, pod, --], home: /state}}\n- {{name: me}}\n"
    )

    found = read_hosts(file, ["/opt/enginehouse"])

    assert [host.name for host in found] == [str(tmp_path), "pod", "me"]
    assert found[1].command == ("kubectl", "exec", "pod", "--", "env", "ENGINEHOUSE_HOME=/state", "enginehouse")
    assert found[2].command == ("/opt/enginehouse",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servers: []", "at least one entry"),
        ("- a", "must hold a list `servers`"),
        ("servers: [{name: a, rum: [x]}]", "server 0 has unknown keys: rum"),
        ("servers: [{run: [x]}]", "server 0 must be text, or have a `name`"),
        ("servers: [{name: a, run: ssh host}]", "`run` must be a list"),
        ("servers: [", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_by_entry(tmp_path: Path, text: str, words: str) -> None:
    """The entry and the key are named."""
    file = tmp_path / "fleet.yaml"
    file.write_text(text)

    with pytest.raises(ConfigurationError, match=words):
        read_hosts(file, ["enginehouse"])
