"""`enginehouse builds`: what lies in the store, and moving it; `push` and `pull` are for remote stores."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table

from enginehouse_cli import remote
from enginehouse_cli.builds_text import describe, differences, size_of, total_bytes
from enginehouse_cli.console import EXIT_FAILED, print_error, print_json, progress_bar, stderr, stdout
from enginehouse_cli.options import JsonFlag, show
from enginehouse_cli.protected import protected_builds
from enginehouse_contract.errors import BuildIntegrityError
from enginehouse_contract.manifest import verify_build
from enginehouse_contract.settings import load_settings

BuildArgument = Annotated[str, typer.Argument(help="Build id, the start of one, a name, or a folder.")]

app = typer.Typer()
remote.attach(app)


@app.callback(invoke_without_command=True)
def builds(context: typer.Context, *, as_json: JsonFlag = False) -> None:
    """List the builds, newest first; look into them, move them, remove them."""
    if context.invoked_subcommand is None:
        list_(as_json=as_json)


@app.command("list")
def list_(*, as_json: JsonFlag = False) -> None:
    """List the builds, newest first."""
    from enginehouse_builders.store import list_builds  # noqa: PLC0415

    rows: list[dict[str, Any]] = [
        {
            "build_id": build.manifest.build_id,
            "name": build.manifest.model_name,
            "target": build.manifest.target,
            "weights": build.manifest.weight_precision,
            "kv": build.manifest.kv_precision,
            "num_bytes": total_bytes(build.manifest),
            "created_at": build.manifest.created_at,
            "path": str(build.build_dir),
        }
        for build in list_builds(load_settings().store_dir)
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("id", "name", "target", "weights", "kv", "size", "made", box=SIMPLE)
    for row in rows:
        size, made = size_of(row["num_bytes"]), row["created_at"][:10]
        table.add_row(row["build_id"][7:19], row["name"], row["target"], row["weights"], row["kv"], size, made)
    stdout.print(table if rows else "no builds yet; make one with `enginehouse build MODEL`.")


@app.command("show")
def show_(build: BuildArgument, *, as_json: JsonFlag = False) -> None:
    """Show what a build is, where it came from, and its files."""
    from enginehouse_builders.provenance import read_provenance  # noqa: PLC0415
    from enginehouse_builders.store import find_build  # noqa: PLC0415

    settings = load_settings()
    found = find_build(settings.store_dir, build)
    provenance = read_provenance(found.build_dir)
    protected = protected_builds(settings).get(found.manifest.build_id)
    value = {
        "path": str(found.build_dir),
        "manifest": dataclasses.asdict(found.manifest),
        "provenance": provenance,
        "kept_because": protected,
    }
    show(value, as_json=as_json, text=describe(found.manifest, provenance, str(found.build_dir), protected))


@app.command("diff")
def diff(first: BuildArgument, second: BuildArgument, *, as_json: JsonFlag = False) -> None:
    """Show how two builds differ: source, quantization, limits, tools, files."""
    from enginehouse_builders.store import find_build  # noqa: PLC0415

    store_dir = load_settings().store_dir
    left, right = (find_build(store_dir, reference).manifest for reference in (first, second))
    found = differences(left, right)
    lines = [f"- {left.build_id}", f"+ {right.build_id}"]
    for name, (old, new) in found.items():
        lines += [name, f"  - {old}", f"  + {new}"]
    text = "\n".join(lines) if found else f"both are {left.build_id}; nothing differs."
    value = {name: {"first": old, "second": new} for name, (old, new) in found.items()}
    show({"first": left.build_id, "second": right.build_id, "differences": value}, as_json=as_json, text=text)


@app.command("verify")
def verify(
    builds_: Annotated[list[str], typer.Argument(metavar="[BUILD]...", help="Which; all without one.")] = [],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Read every byte of builds and compare with their manifests and provenance. Exit code 1 if one is damaged."""
    from enginehouse_builders.provenance import check_provenance  # noqa: PLC0415
    from enginehouse_builders.store import build_folders, find_build  # noqa: PLC0415

    store_dir = load_settings().store_dir
    folders = [find_build(store_dir, reference).build_dir for reference in builds_] or build_folders(store_dir)
    rows: list[dict[str, Any]] = []
    with progress_bar("verify") as progress:
        for index, folder in enumerate(folders):
            progress(folder.name, index / len(folders))
            row: dict[str, Any] = {"path": str(folder), "ok": True, "problem": ""}
            try:
                manifest = verify_build(folder)
                row["provenance"] = check_provenance(folder, manifest)
            except BuildIntegrityError as error:
                row |= {"ok": False, "problem": str(error)}
            rows.append(row)
    if as_json:
        print_json(rows)
    for row in rows if not as_json else []:
        if row["ok"]:
            how = "every byte is as recorded" + ("" if row["provenance"] else "; it has no provenance")
            typer.echo(f"{Path(row['path']).name}: {how}")
        else:
            print_error(row["problem"])
    if not rows and not as_json:
        typer.echo("no builds yet; make one with `enginehouse build MODEL`.")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(EXIT_FAILED)


@app.command("gc")
def gc(
    *,
    keep: Annotated[int, typer.Option("--keep", min=0, help="Newest builds of each name to keep.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove old builds that no release at work needs, and what killed builds left."""
    from enginehouse_builders.store_gc import find_garbage, remove  # noqa: PLC0415

    settings = load_settings()
    protected = protected_builds(settings)
    garbage = find_garbage(settings.store_dir, protected.keys(), keep)
    num_bytes = garbage.num_bytes
    if not dry_run:
        remove(garbage)
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {one.manifest.model_name} {one.manifest.build_id[:19]}" for one in garbage.builds]
    lines += [f"{verb} {folder.name}, of a build that did not end" for folder in garbage.leftovers]
    lines += [f"kept {build_id[:19]}: {why}" for build_id, why in protected.items()]
    lines.append(f"{size_of(num_bytes)} {'would be' if dry_run else 'are'} free" if len(lines) else "nothing to remove")
    value = {
        "removed": [one.manifest.build_id for one in garbage.builds],
        "leftovers": [str(folder) for folder in garbage.leftovers],
        "kept": protected,
        "num_bytes": num_bytes,
        "dry_run": dry_run,
    }
    show(value, as_json=as_json, text="\n".join(lines))


@app.command("export")
def export(
    build: BuildArgument,
    archive: Annotated[Path, typer.Argument(metavar="FILE.tar", help="The tar file to write.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Write a build into one tar file for another host."""
    from enginehouse_builders.store import find_build  # noqa: PLC0415
    from enginehouse_builders.store_archive import export_build  # noqa: PLC0415

    found = find_build(load_settings().store_dir, build)
    with progress_bar("export") as progress:
        num_bytes = export_build(found, archive, progress)
    stderr.print("On the other host: enginehouse builds import FILE.tar", markup=False)
    value = {"build_id": found.manifest.build_id, "path": str(archive.absolute()), "num_bytes": num_bytes}
    show(value, as_json=as_json, text=f"{archive}: {size_of(num_bytes)}, {found.manifest.build_id}")


@app.command("import")
def import_(
    archive: Annotated[Path, typer.Argument(metavar="FILE.tar", help="A file that `builds export` wrote.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Bring a build from a tar file into the store; every digest is checked first."""
    from enginehouse_builders.store_archive import import_build  # noqa: PLC0415

    with progress_bar("import") as progress:
        found, was_there = import_build(archive, load_settings().store_dir, progress)
    how = "was here already" if was_there else "imported"
    value = {"build_id": found.manifest.build_id, "path": str(found.build_dir), "cached": was_there}
    text = f"{found.manifest.model_name}: {how}\n  id    {found.manifest.build_id}\n  path  {found.build_dir}"
    show(value, as_json=as_json, text=text)
