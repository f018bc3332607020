"""`enginehouse releases`: every release, where it stands, and whether the running server has it loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginehouse_cli.console import print_json
from enginehouse_cli.ledger import print_rows
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.release import STAGES
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_builders.promotion.book import ReleaseBook
    from enginehouse_contract.release import Release
    from enginehouse_contract.settings import Settings


def releases(*, as_json: JsonFlag = False) -> None:
    """List the releases, newest first."""
    from enginehouse_builders.promotion.book import ReleaseBook  # noqa: PLC0415 - commands import what they use

    settings = load_settings()
    with ReleaseBook(settings.home) as book:
        rows = release_rows(settings, book)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["stages"] = " ".join(row["stages"])
        row["parameters"] = " ".join(f"{name}={value}" for name, value in row["parameters"].items())
        row["created_at"] = row["created_at"][:19]
        del row["path"]
    if_none = "no releases yet; `enginehouse serve BUILD` makes the first."
    print_rows(rows, as_json=False, as_csv=False, if_none=if_none)


def release_rows(settings: Settings, book: ReleaseBook) -> list[dict[str, Any]]:
    """Return every release as a row."""
    loaded, created = _loaded(settings), book.created()
    pointed = {stage: book.stage(stage) for stage in STAGES}
    canary = book.canary()
    rows = []
    for release in book.releases():
        stages: list[str] = [stage for stage, at in pointed.items() if at is not None and at.number == release.number]
        stages += ["canary"] if canary is not None and canary.release == release.number else []
        rows.append(
            {
                "release": release.name,
                "name": release.model_name,
                "build_id": release.build_id,
                "path": str(release.build_dir),
                "parameters": dict(release.parameters),
                "stages": stages,
                "state": _state(release, loaded),
                "created_at": created[release.number][0],
                "created_by": created[release.number][1],
            }
        )
    return rows


def _state(release: Release, loaded: set[int] | None) -> str:
    if not release.build_dir.is_dir():
        return "build deleted"
    if loaded is None:
        return "no server"
    return "loaded" if release.number in loaded else "not loaded"


def _loaded(settings: Settings) -> set[int] | None:
    """Return what the server of this home has loaded; None when none answers."""
    from enginehouse_backends.server.administration import TritonAdministration  # noqa: PLC0415
    from enginehouse_backends.server.supervisor import read_state  # noqa: PLC0415
    from enginehouse_cli.live_server import TritonLiveServer  # noqa: PLC0415
    from enginehouse_contract.errors import EnginehouseError  # noqa: PLC0415

    if (state := read_state(settings.home)) is None:
        return None
    try:
        with TritonAdministration(state.grpc_url) as administration:
            return TritonLiveServer(settings, state, administration, {}).loaded()
    except EnginehouseError:
        return None
