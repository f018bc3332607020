"""The live repository: what a release is to Triton, how stable names move, and what a full disk or a bad clock does."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path

import pytest

from enginehouse_backends.front_door.routes import parse_routes, parse_sticky_by
from enginehouse_backends.server.release_models import (
    add_routes,
    point_stable_name,
    publish_release,
    read_routes,
    render_live,
    retract_release,
    split_parameters,
    write_routes,
)
from enginehouse_contract.errors import ConfigurationError, PromotionError
from enginehouse_contract.release import Release

FIRST = Release(1, "sha256:a", Path("/builds/a"), "small", {"num_threads": "1"})
SECOND = Release(2, "sha256:b", Path("/builds/b"), "small", {"max_queue_size": "9"})
STABLE = {"ensemble", "tensorrt_llm", "tensorrt_llm_bls"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A live repository that serves the first release."""
    render_live(tmp_path / "repository", FIRST, [], {"max_active_requests": "3"})
    return tmp_path / "repository"


def parameters(folder: Path) -> dict[str, str]:
    """Return the parameters in a model's config."""
    text = (folder / "config.pbtxt").read_text()
    return dict(re.findall(r'key: "(\w+)" value \{ string_value: "([^"]*)"', text))


def step_models(folder: Path) -> list[str]:
    """Return the models that an ensemble calls."""
    return re.findall(r'model_name: "([^"]+)"', (folder / "config.pbtxt").read_text())


def test_a_live_repository_has_the_release_and_the_stable_names(repository: Path) -> None:
    """The release's own models, and the names that clients call over them; nothing else."""
    assert {path.name for path in repository.iterdir()} == {*FIRST.models, *STABLE}
    assert step_models(repository / "ensemble") == list(FIRST.models[:3])
    assert step_models(repository / "tensorrt_llm") == ["tensorrt_llm-r1"]
    assert parameters(repository / "tensorrt_llm-r1") == {
        "build_digest": "sha256:a",
        "gpt_model_path": "/builds/a",
        "gpt_model_type": "inflight_fused_batching",
        "num_threads": "1",
        "release": "r1",
        "tokenizer_dir": "/builds/a",
    }
    assert parameters(repository / "tensorrt_llm_bls")["max_active_requests"] == "3"
    assert "max_active_requests" not in parameters(repository / "tensorrt_llm-r1")


def test_a_shim_is_compiled_so_that_its_use_changes_nothing(repository: Path) -> None:
    """Python would write the compiled file at first use, and Triton would take that for a change of the model."""
    (compiled,) = (repository / "preprocessing-r1" / "1" / "__pycache__").iterdir()
    assert compiled.read_bytes()[4:8] == b"\x01\x00\x00\x00"  # by hash, not compared with the source


def test_publishing_again_changes_nothing(repository: Path) -> None:
    """A published model is never edited; one that is missing is added."""
    publish_release(repository, SECOND)
    before = {path: path.stat().st_mtime_ns for path in repository.rglob("*")}
    publish_release(repository, SECOND)
    assert {path: path.stat().st_mtime_ns for path in repository.rglob("*") if path.is_file()}.items() <= before.items()

    retract_release(repository, SECOND)
    assert {path.name for path in repository.iterdir()} == {*FIRST.models, *STABLE}


def test_stable_names_move_by_one_rename(repository: Path) -> None:
    """The pins and the read-back parameters name the other release."""
    for name in STABLE:
        point_stable_name(repository, name, SECOND, {})
    assert step_models(repository / "ensemble") == list(SECOND.models[:3])
    assert {parameters(repository / name)["build_digest"] for name in STABLE} == {"sha256:b"}
    assert parameters(repository / "tensorrt_llm_bls")["tensorrt_llm_model_name"] == "tensorrt_llm-r2"


def test_a_clock_set_back_does_not_hide_a_change(repository: Path) -> None:
    """Triton reloads only what is newer than what it has: the new file is, whatever the clock says."""
    tomorrow_ns = time.time_ns() + 86_400 * 10**9
    config = repository / "ensemble" / "config.pbtxt"
    os.utime(config, ns=(tomorrow_ns, tomorrow_ns))
    point_stable_name(repository, "ensemble", SECOND, {})

    assert config.stat().st_mtime_ns > tomorrow_ns


def test_routes_are_what_the_front_door_reads(repository: Path) -> None:
    """Shares, what sticks, and releases that are listed before they get a request."""
    write_routes(repository, [(FIRST, 0.9), (SECOND, 0.1)], by="request")
    text = (repository / "tensorrt_llm_bls" / "routes.json").read_text()
    routes = parse_routes(text)

    assert [(route.release, route.weight, route.engine_model) for route in routes] == [
        ("r1", 0.9, "tensorrt_llm-r1"),
        ("r2", 0.1, "tensorrt_llm-r2"),
    ]
    assert parse_sticky_by(text) == "request"

    write_routes(repository, [(FIRST, 1.0)])
    add_routes(repository, [SECOND])
    assert read_routes(repository) == {"r1": 1.0, "r2": 0.0}
    retract_release(repository, SECOND)
    retract_release(repository, FIRST)  # what still gets requests keeps its route
    assert read_routes(repository) == {"r1": 1.0}


@pytest.mark.parametrize("text", ["", "[]", '{"routes": [{"release": "r1"}]}', '{"routes": [{"weight": "x"}]}'])
def test_a_damaged_route_table_reads_as_empty(repository: Path, text: str) -> None:
    """So that a promotion sees that it is not what it should be."""
    (repository / "tensorrt_llm_bls" / "routes.json").write_text(text)
    assert read_routes(repository) == {}


def test_a_full_disk_while_publishing_leaves_nothing_half_done(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third file does not fit: an error that says so, and no part of the release in the repository."""
    written = []
    write_text = Path.write_text

    def write_until_full(path: Path, text: str, encoding: str | None = None) -> int:
        written.append(path)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", write_until_full)
    with pytest.raises(PromotionError, match=r"No space left on device.*Free some space"):
        publish_release(repository, SECOND)
    monkeypatch.undo()

    assert not (repository / "tensorrt_llm-r2").exists()
    assert not list(repository.parent.glob(".publishing-*"))
    publish_release(repository, SECOND)
    assert {*SECOND.models} <= {path.name for path in repository.iterdir()}


def test_settings_of_the_front_door_and_of_a_release() -> None:
    """The front door serves every release, so its settings are not a release's; some are of both."""
    of_release, front_door = split_parameters(
        {"num_threads": "2", "max_active_requests": "4", "skip_special_tokens": "false", "max_queue_size": "7"}
    )
    assert of_release == {"num_threads": "2", "skip_special_tokens": "false", "max_queue_size": "7"}
    assert front_door == {"max_active_requests": "4", "skip_special_tokens": "false", "max_queue_size": "7"}
    with pytest.raises(ConfigurationError, match="`gpt_model_path` cannot be set"):
        split_parameters({"gpt_model_path": "/x"})
    with pytest.raises(ConfigurationError, match="Did you mean `num_threads`"):
        split_parameters({"num_thread": "1"})


def test_each_replaced_file_is_whole(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash before the rename leaves the old file as it was."""
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
    before = (repository / "tensorrt_llm_bls" / "routes.json").read_text()
    with pytest.raises(PromotionError, match="gone"):
        write_routes(repository, [(SECOND, 1.0)])
    assert (repository / "tensorrt_llm_bls" / "routes.json").read_text() == before
    assert json.loads(before)["routes"][0]["release"] == "r1"
