"""Open rows by release, and what sticks to a release: what a promotion relies on in the front door."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from enginehouse_backends.front_door import routes as routes_module
from enginehouse_backends.front_door.open_rows import OpenRows
from enginehouse_backends.front_door.routes import Route, RouteTable, parse_sticky_by
from enginehouse_contract.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT = Route("unnumbered", "tensorrt_llm", "/t", "/e", "sha256:a")


def table(by: str) -> str:
    """Return a route table of one release."""
    route = {"release": "r1", "engine_model": "e", "tokenizer_dir": "", "engine_dir": "", "build_id": "b"}
    return json.dumps({"by": by, "routes": [route]})


def test_rows_are_open_until_they_end() -> None:
    """A release that was met shows with 0; counts come back to 0 whatever the threads do."""
    rows = OpenRows()
    rows.begin("r1", 0)
    assert rows.counts() == {"r1": 0}

    def take_and_end() -> None:
        for _ in range(200):
            rows.begin("r2", 3)
            rows.end("r2")
            rows.end("r2", 2)

    threads = [threading.Thread(target=take_and_end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows.counts() == {"r1": 0, "r2": 0}
    with pytest.raises(AssertionError, match="more rows ended than began"):
        rows.end("r2")


def test_what_sticks_follows_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenant unless the table says request; a table that says something else is not taken."""
    monkeypatch.setattr(routes_module, "_CHECK_PERIOD_S", 0.0)
    path = tmp_path / "routes.json"
    known = RouteTable(path, DEFAULT)
    for number, (by, expected) in enumerate((("tenant", "tenant"), ("request", "request"), ("user", "request"))):
        fresh = tmp_path / str(number)
        fresh.write_text(table(by))
        fresh.replace(path)
        known.current()
        assert known.sticky_by == expected
    assert known.last_error is not None
    assert "`by` must be tenant or request; given 'user'" in known.last_error
    assert parse_sticky_by('{"routes": []}') == "tenant"
    with pytest.raises(ConfigurationError):
        parse_sticky_by(table("user"))
