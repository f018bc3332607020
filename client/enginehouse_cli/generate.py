"""`enginehouse generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginehouse_cli.console import EXIT_INTERRUPTED, Stopwatch, print_json, stderr
from enginehouse_cli.options import (
    JsonFlag,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    SpeculateOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    UrlOption,
    find_server,
)

if TYPE_CHECKING:
    from enginehouse_client import Client, GenerationResult


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    url: UrlOption = None,
    model: ModelOption = "tensorrt_llm_bls",
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop: StopOption = [],
    n: Annotated[int, typer.Option("--n", help="Answers to generate.")] = 1,
    speculate: SpeculateOption = None,
    *,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate a continuation of PROMPT, or an answer to it with --chat. Ctrl-C cancels it on the server."""
    from enginehouse_client import Client  # noqa: PLC0415

    text = sys.stdin.read() if prompt == "-" else prompt
    arguments: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": tuple(stop),
        "n": n,
        "model": model,
        "speculate": speculate,
    }
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with Client(find_server(url)) as client:
        if stream and not as_json:
            print_stream(client, {**asked, **arguments})
            return
        watch = Stopwatch.start()
        result = client.generate(**asked, **arguments)
    if as_json:
        print_json(result_as_json(result, watch.elapsed_s))
        return
    for index, sequence in enumerate(result.sequences):
        if len(result.sequences) > 1:
            stderr.print(f"--- {index}", markup=False)
        typer.echo(sequence.text)


def print_stream(client: Client, request: dict[str, Any]) -> str:
    """Print chunks as they come and return the whole text; Ctrl-C cancels the request and exits with 130."""
    chunks = client.generate_stream(**request)
    text = []
    try:
        for chunk in chunks:
            text.append(chunk.text)
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stderr.print("\ncancelled", markup=False)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    finally:
        chunks.close()
    sys.stdout.write("\n")
    return "".join(text)


def result_as_json(result: GenerationResult, seconds: float) -> dict[str, Any]:
    """Return a result as plain values."""
    return {
        "request_id": result.request_id,
        "build_id": result.build_id,
        "seconds": round(seconds, 4),
        "sequences": [
            {
                "text": sequence.text,
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
                "num_input_tokens": sequence.usage.num_input_tokens,
                "num_cached_input_tokens": sequence.usage.num_cached_input_tokens,
                "num_output_tokens": sequence.usage.num_output_tokens,
            }
            for sequence in result.sequences
        ],
    }
