"""`enginehouse build SPEC` and `enginehouse builds`, over tiny models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.support.small_builds import write_build
from tests.support.tiny_models import TinyModel

from enginehouse_builders.promotion.book import ReleaseBook
from enginehouse_builders.store import list_builds
from enginehouse_cli.main import run
from enginehouse_cli.protected import protected_builds
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

SPEC = "name: tiny\nmodel: {source: tiny.gguf}\nquantization: {weights: int8}\nlimits: {max_batch_size: 2}\n"


class Cli:
    """Runs the command in this process and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        code = run([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder."""
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command, over a state folder of its own."""
    return Cli(capsys)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec beside its model."""
    TinyModel(num_layers=1).write_gguf(tmp_path / "tiny.gguf", "F16", general__basename="tiny")
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    return tmp_path / "spec.yaml"


def test_a_spec_is_built_shown_exported_and_imported(
    cli: Cli, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a build to another host: the same id there, and every byte verified."""
    assert cli("build", spec, "--json") == 0
    made = json.loads(cli.out)
    assert (made["cached"], made["target"], made["name"]) == (False, "cpu", "tiny")
    assert cli("build", spec, "--json") == 0
    assert json.loads(cli.out)["cached"]
    assert cli("builds", "show", "tiny") == 0
    for text in (made["build_id"], "max_batch_size 2", "int8", "slsa.dev/provenance/v1", "gguf tiny.gguf"):
        assert text in cli.out
    assert cli("builds", "export", "tiny", tmp_path / "tiny.tar") == 0
    monkeypatch.setenv("ENGINEHOUSE_HOME", str(tmp_path / "other"))
    assert cli("builds", "import", tmp_path / "tiny.tar", "--json") == 0
    assert json.loads(cli.out)["build_id"] == made["build_id"]
    assert cli("builds", "verify") == 0
    assert "every byte is as recorded" in cli.out


def test_two_builds_are_compared(cli: Cli, spec: Path, tmp_path: Path) -> None:
    """What differs is named; a build does not differ from itself."""
    assert cli("build", spec) == 0
    assert cli("build", tmp_path / "tiny.gguf", "--weights", "int4", "--name", "small") == 0
    assert cli("builds", "diff", "tiny", "small", "--json") == 0
    differences = json.loads(cli.out)["differences"]
    assert differences["weight_precision"] == {"first": "int8", "second": "int4"}
    assert differences["limits/max_batch_size"] == {"first": 2, "second": 64}
    assert "files/openvino_model.bin" in differences
    assert "files/tokenizer.json" not in differences
    assert cli("builds", "diff", "tiny", "tiny") == 0
    assert "nothing differs" in cli.out


def test_verify_finds_the_damaged_one(cli: Cli, home: Path) -> None:
    """One damaged build among several is named, with exit code 1; JSON has a row for each."""
    write_build(home / "store", name="sound", files={"x": b"1"})
    damaged = write_build(home / "store", name="damaged", files={"x": b"2"})
    (damaged / "x").write_bytes(b"3")
    assert cli("builds", "verify") == 1
    assert "the file was changed after the build" in cli.err
    assert "every byte is as recorded" in cli.out
    assert cli("builds", "verify", "--json") == 1
    assert sorted(row["ok"] for row in json.loads(cli.out)) == [False, True]
    assert cli("builds", "verify", "sound") == 0


def test_gc_keeps_what_releases_point_at(cli: Cli, home: Path) -> None:
    """A loaded release's build stays whatever its age; a dry run removes nothing."""
    folders = [write_build(home / "store", files={"x": b"%d" % number}) for number in range(3)]
    builds = {build.build_dir: build.manifest for build in list_builds(home / "store")}
    with ReleaseBook(home) as book:
        manifest = builds[folders[0]]
        book.set_loaded(book.add_release(manifest.build_id, folders[0], manifest.model_name, {}, "tester"))
    assert protected_builds(Settings(home=home)) == {manifest.build_id: "r1 is loaded"}
    assert cli("builds", "gc", "--keep", "0", "--dry-run") == 0
    assert "would remove" in cli.out
    assert len(list_builds(home / "store")) == 3
    assert cli("builds", "gc", "--keep", "0", "--json") == 0
    assert len(json.loads(cli.out)["removed"]) == 2
    assert [build.build_dir for build in list_builds(home / "store")] == [folders[0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "SPEC", "--weights", "int8"], "`--weights` is for building without a spec; given int8"),
        (["build", "SPEC", "--target", "tensorrt_llm"], "`--target` must be one of the spec's: cpu"),
        (["build", "SPEC", "--emit", "out"], "`--emit` writes one GPU target; the spec has none"),
        (["build", "MODEL", "--target", "tensorrt_llm"], "needs a spec"),
        (["build", "MODEL", "--group-size", "32"], "`group_size` is for int4"),
        (["build", "nowhere.yaml"], "there is no such file"),
        (["builds", "show", "nope"], "no build is called `nope`"),
        (["builds", "import", "MODEL"], "is not a whole tar file of a build"),
    ],
)
def test_refusals_are_one_line(cli: Cli, spec: Path, arguments: list[str], message: str) -> None:
    """What is wrong and what to do, and exit code 1."""
    places = {"SPEC": spec, "MODEL": spec.with_name("tiny.gguf")}
    assert cli(*(places.get(argument, argument) for argument in arguments)) == 1
    assert cli.err.splitlines()[-1].startswith("error: ")
    assert message in cli.err
