"""Promotion on a real tritonserver with the real engine: by the command, under load, killed, and misused."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.promotions import House, served_house
from tests.support.steady_load import SteadyLoad, learn_answers

from enginehouse_backends.server.administration import TritonAdministration
from enginehouse_backends.server.release_models import publish_release, read_routes
from enginehouse_backends.server.supervisor import write_state
from enginehouse_builders.promotion.book import ReleaseBook
from enginehouse_builders.promotion.lock import exclusive
from enginehouse_client import Client
from enginehouse_contract.errors import PromotionError
from enginehouse_contract.manifest import read_manifest
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "The capital of France is"
OVERRIDE = ("--override", "a test")


@pytest.fixture(scope="module")
def house(smollm2_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A server that was started on the demo's build: release r1."""
    with served_house(tmp_path_factory.mktemp("promotion") / "home", smollm2_build) as house:
        yield house


@pytest.fixture
def second(smollm2_f32_build: Path) -> str:
    """Another build of the same model."""
    return str(smollm2_f32_build)


@pytest.fixture(autouse=True)
def _r1_is_back(house: House) -> Iterator[None]:
    """Each test begins and ends with r1 in production, and nothing else loaded."""
    yield
    with ReleaseBook(house.settings.home) as book:
        production = book.stage("production")
        is_back = production is not None and production.number == 1 and book.canary() is None
    if not is_back:
        assert house.run("rollback", "--to", "r1").code == 0
    assert answering(house) == {"ensemble": "r1", "tensorrt_llm": "r1", "front door": "r1"}


def answering(house: House) -> dict[str, str]:
    """Return the release behind every stable name: by the server's pins, and by asking the front door."""
    with TritonAdministration(house.state.grpc_url) as administration, Client(house.state.grpc_url) as client:
        by_name = {
            name: {model.rsplit("-", 1)[1] for model in administration.step_models(name)}
            for name in ("ensemble", "tensorrt_llm")
        }
        build_id = client.generate(PROMPT, max_tokens=1).build_id
        client.generate(PROMPT, max_tokens=1, model="ensemble")
    with ReleaseBook(house.settings.home) as book:
        (front,) = {release.name for release in book.releases() if release.build_id == build_id} & set(
            read_routes(house.settings.repository_dir)
        )
    return {**{name: "".join(sorted(found)) for name, found in by_name.items()}, "front door": front}


def loaded(house: House) -> set[str]:
    """Return the releases that the server holds."""
    with TritonAdministration(house.state.grpc_url) as administration:
        models = administration.models().items()
        return {name.rsplit("-", 1)[1] for name, model in models if "-r" in name and model.holds_memory}


def test_promote_and_roll_back_under_load(house: House, smollm2_build: Path, second: str) -> None:
    """No request fails, none mixes two releases, and memory goes back to one release each time."""
    staged = house.run("promote", second, "--stage", "staging", "--json")
    assert staged.code == 0, staged.err
    name = staged.row["release"]
    build_ids = [read_manifest(smollm2_build).build_id, staged.row["build_id"]]
    expected = learn_answers(house.state.grpc_url, ["ensemble-r1", f"ensemble-{name}"], build_ids)
    with SteadyLoad(house.state.grpc_url, expected, rate_per_s=8.0, num_streams=3) as load:
        promoted = house.run("promote", name, *OVERRIDE, "--json", "--why", "faster")
        in_between = answering(house)
        back = house.run("rollback", "--json")
    assert (promoted.code, back.code) == (0, 0), promoted.err + back.err
    assert load.failed == []
    assert load.mixed == []
    assert {build_id for answer in load.answers for build_id in answer.build_ids} == set(build_ids)
    assert set(in_between.values()) == {name}
    assert promoted.row["unloaded"] == ["r1"]
    assert loaded(house) == {"r1", name}  # staging still points at it

    history = house.run("stage", "history", "production", "--json").row
    assert [event["action"] for event in history][-2:] == ["promote", "rollback"]
    assert (history[-2]["why"], history[-2]["override"], history[-2]["from_release"]) == ("faster", "a test", "r1")
    house.run("promote", "r1", "--stage", "staging")
    assert loaded(house) == {"r1"}


@pytest.mark.parametrize(
    ("after", "ending"),
    [
        ("published", "undone"),
        ("loaded", "undone"),
        ("checked", "undone"),
        ("switching", "completed"),
        ("switched", "completed"),
        ("committed", "completed"),
        ("draining", "completed"),
        ("unloaded", "completed"),
    ],
)
def test_killed_at_a_step_the_next_command_ends_it(house: House, second: str, after: str, ending: str) -> None:
    """SIGKILL right after each step: the next command completes or undoes it and says so, and requests never fail."""
    killed = house.run_killed(after, "promote", second, *OVERRIDE)
    if killed.code == 0 and after in {"draining", "unloaded"}:  # r1 is in staging as well: nothing was to be drained
        assert "draining" not in killed.err
        assert house.run("rollback", "--to", "r1").code == 0
        assert loaded(house) == {"r1"}
        return
    assert killed.code == -9
    with Client(house.state.grpc_url) as client:
        assert client.generate(PROMPT, max_tokens=2).text
        assert client.generate(PROMPT, max_tokens=2, model="ensemble").text
    shown = house.run("stage", "show", "--json").row
    assert "promote" in shown["unfinished"]

    with ReleaseBook(house.settings.home) as book:
        newest = book.releases()[0].name
    done = house.run("rollback", "--to", "r1", "--json")
    assert done.code == 0, done.err
    assert ending in done.row["recovered"]
    assert newest in done.row["recovered"]
    assert loaded(house) == {"r1"}


def test_a_build_that_does_not_load_leaves_the_old_one_serving(house: House, second: str, tmp_path: Path) -> None:
    """The server's reason is in the error, and nothing of the failed release stays."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in read_build(second):
        (broken / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((broken / "manifest.json").read_text())
    weights = broken / "openvino_model.xml"
    weights.write_text("<net>")
    record = {"num_bytes": weights.stat().st_size, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()}
    manifest["files"]["openvino_model.xml"] = record
    manifest["build_id"] = "sha256:" + "b" * 64
    (broken / "manifest.json").write_text(json.dumps(manifest))

    done = house.run("promote", str(broken), *OVERRIDE)

    assert done.code == 1
    assert "could not load `tensorrt_llm-r" in done.err
    assert "Traceback" not in done.err
    assert loaded(house) == {"r1"}
    assert house.run("stage", "show", "--json").row["unfinished"] is None


def read_build(folder: str) -> list[Path]:
    """Return the files of a build."""
    return [path for path in Path(folder).iterdir() if path.is_file()]


def test_two_promotions_at_once(house: House, second: str) -> None:
    """One wins; the other is told who is at it, and changes nothing."""
    first = house.start("promote", second, *OVERRIDE)
    deadline_s = time.monotonic() + 60
    while f"(pid {first.pid})" not in house.settings.home.joinpath("promotion.lock").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    other = house.run("rollback")
    _, error = first.communicate(timeout=120)

    assert first.returncode == 0, error
    assert other.code == 1
    assert "`enginehouse promote" in other.err
    assert "is changing what is served" in other.err


def test_production_wants_gates(house: House, second: str) -> None:
    """A build whose gates never ran here is refused, with what to run."""
    done = house.run("promote", second)

    assert done.code == 1
    assert "its gates never ran on this kind of host" in done.err
    assert "enginehouse gate" in done.err


def test_what_was_changed_by_hand_is_refused_and_repaired(house: House, second: str) -> None:
    """A stable name moved by hand, or a release loaded by hand, stops a promotion; a rollback puts it right."""
    name = house.run("promote", second, "--stage", "staging", "--json").row["release"]
    house.run("promote", "r1", "--stage", "staging")
    with ReleaseBook(house.settings.home) as book:
        publish_release(house.settings.repository_dir, book.find_release(name))
    with TritonAdministration(house.state.grpc_url) as administration:
        for model in (f"preprocessing-{name}", f"tensorrt_llm-{name}", f"postprocessing-{name}", f"ensemble-{name}"):
            administration.load(model)
        by_hand = house.run("promote", name, *OVERRIDE)
        ensemble = house.settings.repository_dir / "ensemble" / "config.pbtxt"
        kept = ensemble.read_text()
        ensemble.write_text(kept.replace("-r1", f"-{name}"))
        administration.load("ensemble")
        moved = house.run("promote", name, *OVERRIDE)
        repaired = house.run("rollback", "--to", "r1")
        administration.unload(f"ensemble-{name}")
        for model in (f"preprocessing-{name}", f"tensorrt_llm-{name}", f"postprocessing-{name}"):
            administration.unload(model)

    assert f"`tensorrt_llm-{name}` was loaded by hand" in by_hand.err
    assert "changed by hand" in moved.err
    assert repaired.code == 0, repaired.err
    assert (by_hand.code, moved.code) == (1, 1)


def test_a_slow_canary_is_rolled_back_by_itself(house: House, smollm2_build: Path) -> None:
    """The serving process judges it, ends it, and says why; requests go on."""
    with SteadyLoad(house.state.grpc_url, {}, rate_per_s=6.0, num_streams=1) as load:
        slow = ("--parameter", "max_num_tokens=1")  # a prompt takes a step for each of its tokens
        canary = ("--canary", "50%", "--by", "request", "--min-requests", "20", "--watch")
        done = house.run("promote", str(smollm2_build), *OVERRIDE, *slow, *canary)

    assert done.code == 1, done.err + done.out
    assert "was rolled back" in done.err
    assert "time to first token" in done.err
    assert load.failed == []
    event = house.run("stage", "history", "production", "--json").row[-1]
    assert (event["action"], event["to_release"], event["who"]) == ("canary_end", "r1", "enginehouse serve")
    deadline_s = time.monotonic() + 60
    while loaded(house) != {"r1"}:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def test_with_memory_for_one_the_gap_is_told(house: House, second: str) -> None:
    """The old release goes first; the command says so before, and how long nobody answered after."""
    done = house.run("promote", second, *OVERRIDE, "--swap", "unload-first", "--json")

    assert done.code == 0, done.err
    assert "the old release is unloaded first. Nobody answers in between" in done.err
    assert done.row["gap_s"] > 0
    assert set(answering(house).values()) == {done.row["release"]}


def test_a_release_whose_build_was_deleted(house: House, second: str, tmp_path: Path) -> None:
    """It cannot come back, and the error says what to build again."""
    copy = tmp_path / "copy"
    shutil.copytree(second, copy)
    name = house.run("promote", str(copy), "--stage", "staging", "--json").row["release"]
    house.run("promote", "r1", "--stage", "staging")
    shutil.rmtree(copy)
    refused = [house.run("promote", name, *OVERRIDE), house.run("rollback", "--to", name)]

    assert [done.code for done in refused] == [1, 1]
    assert all(f"the build of {name} was deleted" in done.err for done in refused)
    (row,) = [row for row in house.run("releases", "--json").row if row["release"] == name]
    assert row["state"] == "build deleted"


def test_a_server_that_died_in_the_middle_starts_with_what_was_in_production(
    smollm2_build: Path, second: str, tmp_path: Path
) -> None:
    """The change that was cut short is undone when the server starts again, and it says so."""
    home = tmp_path / "home"
    with served_house(home, smollm2_build) as house:
        assert house.run_killed("switching", "promote", second, *OVERRIDE).code == -9
    with served_house(home, None) as house:
        assert set(answering(house).values()) == {"r1"}
        shown = house.run("stage", "show", "--json").row
        assert (shown["unfinished"], shown["production"]["release"]) == (None, "r1")
        record_other_server(house)
        other = house.run("rollback", "--to", "r1")
        assert other.code == 1
        assert "serves another repository" in other.err


def record_other_server(house: House) -> None:
    """Make the state file name a port that its server does not have."""
    write_state(house.settings.home, replace(house.state, grpc_port=house.state.http_port))


def test_no_server_no_promotion(tmp_path: Path, second: str) -> None:
    """Exit code 3 and what to do, and no traceback."""
    done = House(Settings(home=tmp_path / "empty")).run("promote", second)
    assert done.code == 3
    assert "start one with `enginehouse serve`" in done.err


def test_bad_words_are_refused_in_one_line(house: House, second: str) -> None:
    """Unknown build, stage, release, share, swap and setting; a deleted build."""
    for arguments, message in (
        (("promote", "nope"), "no build is called `nope`"),
        (("promote", "r99"), "there is no release r99"),
        (("promote", second, "--stage", "prod"), "`stage` must be staging or production"),
        (("promote", second, "--canary", "150%"), "`--canary` must be a share"),
        (("promote", second, "--swap", "both"), "`--swap` must be auto"),
        (("promote", second, "--override", " "), "`--override` must give a reason"),
        (("promote", second, "--parameter", "num_thread=1"), "Did you mean `num_threads`?"),
        (("promote", second, "--parameter", "skip_special_tokens=false"), "is the front door's"),
        (("rollback", "--to", "newest"), "must be like r12"),
        (("stage", "show", "prod"), "`stage` must be staging or production"),
    ):
        done = house.run(*arguments)
        assert done.code == 1, arguments
        assert done.err.splitlines()[-1].startswith("error: "), done.err
        assert message in done.err
        assert "Traceback" not in done.err


def test_the_lock_is_gone_with_its_holder(house: House) -> None:
    """A command that was killed does not lock others out."""
    with exclusive(house.settings.home, "a test"):
        refused = house.run("rollback")
    assert refused.code == 1
    assert "`a test`" in refused.err
    with (
        exclusive(house.settings.home, "another"),
        pytest.raises(PromotionError, match="another"),
        exclusive(house.settings.home, "a third"),
    ):
        pass
