"""`enginehouse spec`: write a spec to start from, check one, print its schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from enginehouse_cli.console import EXIT_FAILED, print_error, print_json
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.errors import ConfigurationError
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_builders.spec.problems import Problem

app = typer.Typer(help="Specs: what an engine should be.", no_args_is_help=True)


@app.command("init")
def init(
    model: Annotated[Path, typer.Argument(help="A GGUF file, a Hugging Face folder or a TensorRT-LLM checkpoint.")],
    device: Annotated[str, typer.Option("--device", help="The device to build for: cpu, h100, l40s, ...")] = "cpu",
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="The file to write; without it, standard output.")
    ] = None,
    name: Annotated[Optional[str], typer.Option("--name", help="The model's name; without it, the file's.")] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a good spec for a model on a device, with comments."""
    from enginehouse_builders.plan.reading import read_shape  # noqa: PLC0415 - commands import what they use
    from enginehouse_builders.spec.starting import starting_spec  # noqa: PLC0415
    from enginehouse_cli.plan import find_device  # noqa: PLC0415

    if output is not None and output.exists() and not force:
        raise ConfigurationError(f"{output} exists; give --force to write over it, or another --output.")
    found = find_device(device, load_settings().cache_dir)
    text = starting_spec(model.expanduser().absolute(), read_shape(model.expanduser()), found, name)
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {output}\nnext: enginehouse plan {output}")


@app.command("check")
def check(
    spec: Annotated[Path, typer.Argument(help="The spec's YAML file.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Say all that is wrong with a spec; exit code 1 if anything is."""
    from enginehouse_builders.spec.loading import load_spec  # noqa: PLC0415 - commands import what they use
    from enginehouse_builders.spec.problems import SpecError  # noqa: PLC0415

    fine = ""
    problems: tuple[Problem, ...] = ()
    try:
        loaded = load_spec(spec)
        fine = f"{spec}: fine ({loaded.name}, for {', '.join(loaded.targets)})"
    except SpecError as error:
        problems = error.problems
    if as_json:
        rows = [{"field": one.field, "line": one.line, "message": one.message} for one in problems]
        print_json({"ok": not problems, "problems": rows})
    for problem in () if as_json else problems:
        print_error(problem.located(str(spec)))
    if problems:
        raise typer.Exit(EXIT_FAILED)
    if not as_json:
        typer.echo(fine)


@app.command("schema")
def schema() -> None:
    """Print the JSON Schema of specs."""
    from enginehouse_builders.spec.schema import schema_text  # noqa: PLC0415

    typer.echo(schema_text(), nl=False)
