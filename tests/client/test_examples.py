"""The examples for CI, fleets, services and containers: they parse, and their commands are commands of ours."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
import yaml

from enginehouse_builders.fleet.hosts import read_hosts
from enginehouse_builders.residency.service_file import read_services
from enginehouse_cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
DOCKER = ROOT / "docker"
FILES = [
    EXAMPLES / "github-actions.yml",
    EXAMPLES / "gitlab-ci.yml",
    *(ROOT / "docs" / name for name in ("fleets.md", "residency.md")),
    *DOCKER.iterdir(),
]


def commands_of(path: Path) -> Iterator[list[str]]:
    """The words after `enginehouse` of every command in a file, whatever else is on its line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        plain = "" if line.lstrip().startswith("#") else line.replace("${{", "$").replace("}}", "")
        if found := re.search(r"(?:^|[\s\"`(])enginehouse ([a-z][^`#|;>]*)", plain):
            words = shlex.split(found[1], comments=False)
            if words[0] in GROUP.commands:
                yield words


GROUP: Any = typer.main.get_command(app)
COMMANDS = sorted({tuple(words) for path in FILES for words in commands_of(path)})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_of_the_examples_is_one(words: tuple[str, ...]) -> None:
    """Each names a command that there is, with arguments and options that it takes; nothing is run."""
    command, rest = GROUP.commands[words[0]], list(words[1:])
    while hasattr(command, "commands") and rest and rest[0] in command.commands:
        command, rest = command.commands[rest[0]], rest[1:]

    with command.make_context(words[-1], rest) as context:
        assert not context.args


def test_the_examples_build_gate_promote_and_roll_back() -> None:
    """Both pipelines have every step."""
    for name, wanted in {
        "github-actions.yml": {"build", "builds", "gate", "promote", "rollback", "ready", "stage"},
        "gitlab-ci.yml": {"build", "builds", "gate", "promote", "fleet"},
    }.items():
        assert {words[0] for words in commands_of(EXAMPLES / name)} == wanted


def test_files_that_we_read_are_read() -> None:
    """The fleet and the services of the examples pass our own readers."""
    assert [host.name for host in read_hosts(EXAMPLES / "fleet.yml", ["enginehouse"])] == [
        "serving@gpu1",
        "serving@gpu2",
        "pod-0",
    ]
    assert read_services(EXAMPLES / "services.yml").services["chat"].pinned


def test_containers_have_what_the_server_needs() -> None:
    """Enough shared memory, an address that others reach, time to end, and files that exist where they are copied."""
    compose = yaml.safe_load((DOCKER / "compose.yml").read_text())["services"]["server"]
    *_, stateful_set = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
    pod = stateful_set["spec"]["template"]["spec"]

    assert compose["shm_size"] == "1gb"
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]  # noqa: S108
    assert pod["terminationGracePeriodSeconds"] > 15
    for dockerfile in DOCKER.glob("*.Dockerfile"):
        text = dockerfile.read_text()
        assert "ENGINEHOUSE_BIND_ADDRESS=0.0.0.0" in text
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
            *sources, _ = line.split()
            assert all((ROOT / source).exists() for source in sources), line
