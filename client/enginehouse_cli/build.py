"""`enginehouse build`: from a spec, or just a model, to a recorded build in the store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Optional

import typer

from enginehouse_cli.console import Stopwatch, print_json, progress_bar
from enginehouse_cli.options import JsonFlag, show
from enginehouse_contract.errors import ConfigurationError, refusal
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_builders.cpu.options import BuildOptions
    from enginehouse_builders.spec.model import Spec
    from enginehouse_contract.manifest import Manifest

_SPEC_SUFFIXES: Final = (".yaml", ".yml")
_OPTIONS: Final = {"weight_precision": "--weights", "kv_precision": "--kv"}  # those that are named otherwise


def build(
    model: Annotated[
        Path, typer.Argument(metavar="SPEC_OR_MODEL", help="A spec (YAML), or a GGUF file or Hugging Face folder.")
    ],
    target: Annotated[
        Optional[str], typer.Option("--target", help="Of a spec's targets, only this one; for a model: cpu.")
    ] = None,
    emit: Annotated[
        Optional[Path],
        typer.Option("--emit", help="For a GPU target: write the script that builds into this folder, and stop."),
    ] = None,
    weights: Annotated[
        Optional[str],
        typer.Option("--weights", help="as_in_file (the default), int8, int4, int4_awq, int4_gptq, f16 or f32."),
    ] = None,
    group_size: Annotated[
        Optional[int], typer.Option("--group-size", help="Weights that share a scale, for int4: 32 unless given.")
    ] = None,
    kv: Annotated[Optional[str], typer.Option("--kv", help="KV cache precision: u8 (the default), f16 or f32.")] = None,
    name: Annotated[Optional[str], typer.Option("--name", help="A name to find the build by.")] = None,
    max_seq_len: Annotated[
        Optional[int], typer.Option("--max-seq-len", help="Prompt and answer together, in tokens.")
    ] = None,
    max_batch_size: Annotated[
        Optional[int], typer.Option("--max-batch-size", help="Sequences generated at a time: 64 unless given.")
    ] = None,
    max_num_tokens: Annotated[
        Optional[int], typer.Option("--max-num-tokens", help="Tokens computed per step: 512 unless given.")
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Build an engine from a spec or a model. Building the same again is a cache hit; a failed build goes on."""
    given: dict[str, Any] = {
        "weight_precision": weights,
        "group_size": group_size,
        "kv_precision": kv,
        "name": name,
        "max_seq_len": max_seq_len,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
    }
    asked: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if model.suffix.lower() in _SPEC_SUFFIXES and not model.is_dir():
        results = _build_spec(model, target, emit, asked)
    elif target not in {None, "cpu"} or emit is not None:
        hint = "Write a spec for it with `enginehouse spec init MODEL --device NAME`."
        raise ConfigurationError(refusal("--target", "needs a spec where it is not cpu", given=target, hint=hint))
    else:
        from enginehouse_builders.cpu.options import BuildOptions  # noqa: PLC0415 - commands import what they use

        results = [_build_cpu(BuildOptions(model=model, **asked))]
    if as_json:
        print_json(results[0] if len(results) == 1 else results)
        return
    for result in results:
        show(result, as_json=False, text=_describe(result))


def _build_spec(path: Path, target: str | None, emit: Path | None, asked: dict[str, Any]) -> list[dict[str, Any]]:
    from enginehouse_builders.cpu.options import options_of  # noqa: PLC0415
    from enginehouse_builders.spec.loading import load_spec  # noqa: PLC0415

    if asked:
        field = next(iter(asked))
        option = _OPTIONS.get(field, f"--{field.replace('_', '-')}")
        hint = "Write it into the spec, or build from a model."
        raise ConfigurationError(refusal(option, "is for building without a spec", given=asked[field], hint=hint))
    spec = load_spec(path)
    if target is not None and target not in spec.targets:
        raise ConfigurationError(
            refusal("--target", f"must be one of the spec's: {', '.join(spec.targets)}", given=target)
        )
    targets = [one for one in spec.targets if target in {None, one}]
    if emit is not None:
        gpu = [one for one in targets if one != "cpu"]
        if len(gpu) != 1:
            problem = f"writes one GPU target; the spec has {', '.join(gpu) or 'none'}"
            raise ConfigurationError(refusal("--emit", problem, hint="Choose one with --target."))
        return [_emit(spec, gpu[0], emit)]
    return [_build_cpu(options_of(spec)) if one == "cpu" else _build_gpu(spec, one) for one in targets]


def _build_cpu(options: BuildOptions) -> dict[str, Any]:
    from enginehouse_builders.cpu.build import build_engine  # noqa: PLC0415

    settings, watch = load_settings(), Stopwatch.start()
    with progress_bar("build") as progress:
        result = build_engine(options, settings.store_dir, progress, logs_dir=settings.logs_dir / "builds")
    return _result(result.manifest, result.build_dir, watch, cached=result.cached)


def _build_gpu(spec: Spec, target: Any) -> dict[str, Any]:
    from enginehouse_builders.store import adopt_build  # noqa: PLC0415
    from enginehouse_builders.targets.emission import build as build_target  # noqa: PLC0415

    settings, watch = load_settings(), Stopwatch.start()
    work_dir = settings.cache_dir / "targets" / f"{spec.name}-{target}"
    shutil.rmtree(work_dir, ignore_errors=True)
    with progress_bar("build") as progress:
        progress(f"{target} by its own script", 0.0)
        made = build_target(spec, target, work_dir)
        stored = adopt_build(Path(made["engine_dir"]), settings.store_dir)
    return {**_result(stored.manifest, stored.build_dir, watch, cached=False), "log": made["log"]}


def _emit(spec: Spec, target: Any, folder: Path) -> dict[str, Any]:
    from enginehouse_builders.targets.emission import emit  # noqa: PLC0415

    emitted = emit(spec, target, folder)
    return {
        "target": target,
        "path": str(emitted.folder),
        "script": str(emitted.script),
        "files": list(emitted.files),
        "container_image": emitted.container_image,
        "container_command": emitted.container_command,
    }


def _result(manifest: Manifest, build_dir: Path, watch: Stopwatch, *, cached: bool) -> dict[str, Any]:
    return {
        "build_id": manifest.build_id,
        "name": manifest.model_name,
        "target": manifest.target,
        "path": str(build_dir),
        "cached": cached,
        "seconds": round(watch.elapsed_s, 3),
    }


def _describe(result: dict[str, Any]) -> str:
    if "script" in result:
        return (
            f"{result['target']}: written, not built\n  script  {result['script']}\n"
            f"  run it in the pinned container:\n  {result['container_command']}"
        )
    how = "already built" if result["cached"] else f"built in {result['seconds']:.1f} s"
    target = "" if result["target"] == "cpu" else f" ({result['target']})"
    return f"{result['name']}{target}: {how}\n  id    {result['build_id']}\n  path  {result['path']}"
