"""A server with two engine models: a target, and the draft model that the front door drafts with."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.servers import RunningServer

from enginehouse_backends.server.repository import render_repository
from enginehouse_backends.server.supervisor import ServerOptions, TritonServer
from enginehouse_contract.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DRAFT_MODEL = "tensorrt_llm_draft"


@contextmanager
def draft_server(target_dir: Path, draft_dir: Path, home: Path, num_front_doors: int = 1) -> Iterator[RunningServer]:
    """Serve *target_dir*, drafted for by *draft_dir*, behind so many instances of the front door."""
    settings = Settings(home=home)
    repository = settings.repository_dir
    budget = {"kv_cache_memory_budget_bytes": str(2**29)}
    render_repository(repository, target_dir, {**budget, "tensorrt_llm_draft_model_name": DRAFT_MODEL})
    scratch = home / "draft"
    render_repository(scratch, draft_dir, budget)
    shutil.move(scratch / "tensorrt_llm", repository / DRAFT_MODEL)
    shutil.rmtree(scratch)
    rewrite(repository / DRAFT_MODEL / "config.pbtxt", 'name: "tensorrt_llm"', f'name: "{DRAFT_MODEL}"')
    front_door = repository / "tensorrt_llm_bls" / "config.pbtxt"
    rewrite(front_door, "instance_group [ { count: 1", f"instance_group [ {{ count: {num_front_doors}")
    with TritonServer(settings, ServerOptions(repository)) as server:
        assert server.state is not None
        yield RunningServer(server.state, settings, server)


def rewrite(path: Path, old: str, new: str) -> None:
    """Replace the first *old* in a file."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
