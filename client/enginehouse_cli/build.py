"""`enginehouse build`: from a model to a recorded build in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from enginehouse_cli.console import Stopwatch, progress_bar
from enginehouse_cli.options import JsonFlag, show
from enginehouse_contract.settings import load_settings


def build(
    model: Annotated[Path, typer.Argument(help="A GGUF file or a Hugging Face folder.")],
    weights: Annotated[
        str, typer.Option("--weights", help="as_in_file (GGUF), int8, int4, f16 or f32.")
    ] = "as_in_file",
    kv: Annotated[str, typer.Option("--kv", help="KV cache precision: u8, f16 or f32.")] = "u8",
    name: Annotated[Optional[str], typer.Option("--name", help="A name to find the build by.")] = None,
    max_seq_len: Annotated[
        Optional[int],
        typer.Option("--max-seq-len", help="Prompt and answer together, in tokens."),
    ] = None,
    max_batch_size: Annotated[int, typer.Option("--max-batch-size", help="Sequences generated at a time.")] = 64,
    max_num_tokens: Annotated[int, typer.Option("--max-num-tokens", help="Tokens computed per step.")] = 512,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Build an engine for this CPU. Building the same thing again is a cache hit."""
    from enginehouse_builders.cpu.build import BuildOptions, build_engine  # noqa: PLC0415

    options = BuildOptions(
        model=model,
        weight_precision=weights,
        kv_precision=kv,
        name=name,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
    )
    watch = Stopwatch.start()
    with progress_bar("build") as progress:
        result = build_engine(options, load_settings().store_dir, progress)
    manifest = result.manifest
    how = "already built" if result.cached else f"built in {watch.elapsed_s:.1f} s"
    show(
        {
            "build_id": manifest.build_id,
            "name": manifest.model_name,
            "path": str(result.build_dir),
            "cached": result.cached,
            "seconds": round(watch.elapsed_s, 3),
        },
        as_json=as_json,
        text=f"{manifest.model_name}: {how}\n  id    {manifest.build_id}\n  path  {result.build_dir}",
    )
