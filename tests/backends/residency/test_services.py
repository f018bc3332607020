"""The file of services: written, read, changed while it is read, and damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.small_builds import write_build

from enginehouse_backends.residency.publishing import Service, publish_services
from enginehouse_backends.residency.records import ManagedEngine, ResidencyLimits
from enginehouse_backends.residency.services import SERVICES_FILE, ServiceTable
from enginehouse_contract.errors import BuildError, ConfigurationError, InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = ResidencyLimits(100, max_wait_s=5.0, idle_unload_s=60.0)


def service(tmp_path: Path, name: str, **fields: object) -> Service:
    """A service of a build of a few bytes."""
    build_dir = write_build(tmp_path / "store", name=name, files={"a.bin": name.encode()})
    return Service(name, "sha256:" + "1" * 64, build_dir, 10, **fields)  # type: ignore[arg-type]


def test_what_is_published_is_read(tmp_path: Path) -> None:
    """Limits, routes and engines come back; each engine has a model folder that says what it serves."""
    pinned = service(tmp_path, "chat", is_pinned=True, parameters={"num_threads": "1"})
    publish_services(tmp_path / "services", [pinned], LIMITS, "host:8001")

    found = ServiceTable(tmp_path / "services" / SERVICES_FILE).current()

    assert (found.limits, found.grpc_url) == (LIMITS, "host:8001")
    assert found.engines == (ManagedEngine(pinned.engine_model, 10, is_pinned=True),)
    route = found.routes["chat"]
    assert (route.engine_model, route.build_id, route.engine_dir) == (
        pinned.engine_model,
        pinned.build_id,
        str(pinned.build_dir),
    )
    config = (tmp_path / "services" / pinned.engine_model / "config.pbtxt").read_text()
    assert f'name: "{pinned.engine_model}"' in config
    assert 'key: "num_threads" value { string_value: "1" }' in config
    assert 'key: "release" value { string_value: "chat" }' in config


def test_a_service_is_known_as_soon_as_it_is_published(tmp_path: Path) -> None:
    """A name that was unknown a moment ago is looked up anew before it is refused."""
    table = ServiceTable(tmp_path / SERVICES_FILE)
    with pytest.raises(InvalidRequestError, match=r"`service` names no service; given chat\. Services here: none"):
        table.route("chat")

    publish_services(tmp_path, [service(tmp_path, "chat")], LIMITS)

    assert table.route("chat").release == "chat"


def test_other_settings_are_another_engine_and_old_ones_go_one_call_later(tmp_path: Path) -> None:
    """The engine in force before stays on disk, since it may still be loaded; what was before that is removed."""
    folder = tmp_path / "services"
    engines = []
    for threads in ("1", "2", "3"):
        changed = service(tmp_path, "chat", parameters={"num_threads": threads})
        publish_services(folder, [changed], LIMITS)
        engines.append(changed.engine_model)

    assert len(set(engines)) == 3
    assert {path.name for path in folder.iterdir()} == {SERVICES_FILE, engines[1], engines[2]}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"memory_budget_bytes": 1, "max_wait_s": 1, "services": [{}]}'])
def test_a_damaged_file_leaves_the_last_good_one_in_force(tmp_path: Path, text: str) -> None:
    """The table says what is wrong and goes on."""
    publish_services(tmp_path, [service(tmp_path, "chat")], LIMITS)
    table = ServiceTable(tmp_path / SERVICES_FILE)
    assert table.route("chat")
    (tmp_path / SERVICES_FILE).write_text(text)

    with pytest.raises(InvalidRequestError):
        table.route("other")

    assert table.route("chat")
    assert table.last_error is not None
    assert "write it again" in table.last_error


def test_what_cannot_be_served_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """An unknown parameter, and a folder that cannot be written."""
    with pytest.raises(ConfigurationError, match="num_thread"):
        publish_services(tmp_path / "services", [service(tmp_path, "chat", parameters={"num_thread": "1"})], LIMITS)
    assert not (tmp_path / "services").exists()

    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written"):
        publish_services(tmp_path / "file", [service(tmp_path, "chat")], LIMITS)
