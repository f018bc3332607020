"""`enginehouse demo`: the whole way once, for real: fetch, build, serve, ask over gRPC and HTTP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from enginehouse_cli.console import Stopwatch, print_json, progress_bar, stderr, stdout
from enginehouse_cli.options import JsonFlag
from enginehouse_contract.settings import load_settings

if TYPE_CHECKING:
    from enginehouse_client import Client

_QUESTIONS: Final = (
    ("gRPC, streaming", "grpc", True, "What is the capital of France? Answer in one sentence."),
    ("HTTP, streaming", "http", True, "Name three primary colors."),
    ("HTTP, whole answer", "http", False, "Write a haiku about the sea."),
)


def demo(
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch a small real model, build it, start a real Triton server, and ask it real questions."""
    from enginehouse_builders.cpu.build import BuildOptions, build_engine  # noqa: PLC0415
    from enginehouse_builders.demo_model import fetch_demo_model  # noqa: PLC0415
    from enginehouse_cli.serving import serving  # noqa: PLC0415
    from enginehouse_client import Client  # noqa: PLC0415

    settings = load_settings()
    watch = Stopwatch.start()
    with progress_bar("model") as progress:
        model = fetch_demo_model(settings.cache_dir, progress)
    with progress_bar("build") as progress:
        result = build_engine(BuildOptions(model=model), settings.store_dir, progress)
    _say(f"build    {result.manifest.build_id[:19]}  ({'cached' if result.cached else 'new'})", as_json=as_json)
    with serving(settings, result.build_dir) as (server, state, _):
        _say(f"serving  gRPC {state.grpc_url}, HTTP {state.http_url}", as_json=as_json)
        answers: list[dict[str, Any]] = []
        for title, way, is_streaming, question in _QUESTIONS:
            with Client(state.grpc_url if way == "grpc" else state.http_url) as client:
                _say(f"\n[{title}] {question}", as_json=as_json)
                answer = _ask(client, question, is_streaming=is_streaming, as_json=as_json)
                answer["since_start_s"] = round(watch.elapsed_s, 2)
                answers.append({"way": title, "question": question, **answer})
        if as_json:
            seconds = round(watch.elapsed_s, 2)
            print_json({"build_id": result.manifest.build_id, "answers": answers, "seconds": seconds})
        if keep:
            stderr.print(f'\nIt runs on: enginehouse generate --chat --url {state.grpc_url} "Hello!"', markup=False)
            stderr.print("Ctrl-C stops it.")
            try:
                server.wait()
            except KeyboardInterrupt:
                stderr.print("stopping")


def _ask(client: Client, question: str, *, is_streaming: bool, as_json: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    started_s = time.perf_counter()
    if not is_streaming:
        result = client.generate(messages=messages, max_tokens=48)
        if not as_json:
            typer.echo(result.text)
        return {"text": result.text, "seconds": round(time.perf_counter() - started_s, 3)}
    first_s, text = None, []
    for chunk in client.generate_stream(messages=messages, max_tokens=48):
        first_s = first_s or time.perf_counter() - started_s
        text.append(chunk.text)
        if not as_json:
            typer.echo(chunk.text, nl=False)
    if not as_json:
        typer.echo(f"\n(first token after {1000 * (first_s or 0):.0f} ms)")
    return {
        "text": "".join(text),
        "time_to_first_token_s": round(first_s or 0, 4),
        "seconds": round(time.perf_counter() - started_s, 3),
    }


def _say(text: str, *, as_json: bool) -> None:
    (stderr if as_json else stdout).print(text, markup=False)
