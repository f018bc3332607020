"""`enginehouse builds push` and `builds pull`: builds to and from a remote store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from enginehouse_cli.console import progress_bar
from enginehouse_cli.options import JsonFlag, show
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable

UrlArgument = Annotated[str, typer.Argument(help="s3://bucket/folder, gs://bucket/folder or file:///folder.")]


def push(
    build: Annotated[str, typer.Argument(help="Build id, the start of one, a name, or a folder.")],
    url: UrlArgument,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Copy a build to a remote store; what is there already is not sent again."""
    from enginehouse_builders.remote.location import open_store  # noqa: PLC0415
    from enginehouse_builders.remote.transfer import push_build  # noqa: PLC0415
    from enginehouse_builders.store import find_build  # noqa: PLC0415

    found = find_build(load_settings().store_dir, build)
    with progress_bar("push") as progress:
        pushed = push_build(found.build_dir, open_store(url), progress)
    how = "was there already" if pushed.was_there else f"{pushed.num_bytes_sent / 1e6:.1f} MB sent"
    show(
        {
            "build_id": pushed.manifest.build_id,
            "name": pushed.manifest.model_name,
            "url": pushed.url,
            "num_bytes_sent": pushed.num_bytes_sent,
            "num_files_sent": pushed.num_files_sent,
        },
        as_json=as_json,
        text=f"{pushed.manifest.model_name}: {how}\n  id   {pushed.manifest.build_id}\n  url  {pushed.url}",
    )


def pull(
    url: UrlArgument,
    build: Annotated[str, typer.Argument(help="Build id, the start of one, its folder, or a name.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Bring a build into the local store, every digest checked; run again, it goes on where it stopped."""
    from enginehouse_builders.remote.location import open_store  # noqa: PLC0415
    from enginehouse_builders.remote.transfer import pull_build  # noqa: PLC0415

    with progress_bar("pull") as progress:
        pulled = pull_build(open_store(url), build, load_settings().store_dir, progress)
    manifest, path = pulled.build.manifest, pulled.build.build_dir
    how = "was here already" if pulled.was_there else f"{pulled.num_bytes_fetched / 1e6:.1f} MB fetched"
    show(
        {
            "build_id": manifest.build_id,
            "name": manifest.model_name,
            "path": str(path),
            "num_bytes_fetched": pulled.num_bytes_fetched,
            "cached": pulled.was_there,
        },
        as_json=as_json,
        text=f"{manifest.model_name}: {how}\n  id    {manifest.build_id}\n  path  {path}",
    )


def fetch_if_remote(reference: str) -> str:
    """Return what names a build here: the reference as it is, or for a URL the folder that it was pulled to."""
    from enginehouse_builders.remote.local import ensure_local  # noqa: PLC0415
    from enginehouse_builders.remote.location import is_url  # noqa: PLC0415

    if not is_url(reference):
        return reference
    with progress_bar("pull") as progress:
        return str(ensure_local(reference, load_settings().home, progress))


def attach(group: typer.Typer) -> None:
    """Add the commands to the group `enginehouse builds`."""
    commands: dict[str, Callable[..., None]] = {"push": push, "pull": pull}
    for name, command in commands.items():
        group.command(name)(command)
