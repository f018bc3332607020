"""`enginehouse generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginehouse_cli.console import Stopwatch, print_json, stderr
from enginehouse_cli.options import (
    DEFAULT_MODEL,
    BadWordOption,
    FrequencyPenaltyOption,
    JsonFlag,
    MaxTokensOption,
    MinTokensOption,
    ModelOption,
    PresencePenaltyOption,
    RepetitionPenaltyOption,
    SeedOption,
    ServiceOption,
    SpeculateOption,
    StopOption,
    TemperatureOption,
    TenantOption,
    TimeoutOption,
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
    model: ModelOption = DEFAULT_MODEL,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    stop: StopOption = [],
    bad_word: BadWordOption = [],
    min_tokens: MinTokensOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    n: Annotated[int, typer.Option("--n", help="Answers to generate.")] = 1,
    speculate: SpeculateOption = None,
    tenant: TenantOption = None,
    service: ServiceOption = None,
    timeout: TimeoutOption = 600.0,
    *,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    log_probs: Annotated[bool, typer.Option("--log-probs", help="Add log probabilities to --json.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate a continuation of PROMPT, or an answer to it with --chat. Ctrl-C cancels it on the server."""
    from enginehouse_client import Client  # noqa: PLC0415 - commands import what they use

    text = sys.stdin.read() if prompt == "-" else prompt
    asked: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop,
        "bad_words": bad_word,
        "min_tokens": min_tokens,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "n": n,
        "speculate": speculate,
        "service": service,
        "tenant": tenant,
        "return_log_probs": log_probs,
        "model": model,
        "timeout_s": timeout,
        **({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}),
    }
    with Client(find_server(url)) as client:
        if stream and n == 1 and not as_json:
            print_stream(client, asked)
            return
        watch = Stopwatch.start()
        result = client.generate(**asked)
    if as_json:
        print_json(result_as_json(result, watch.elapsed_s))
        return
    for index, sequence in enumerate(result.sequences):
        if len(result.sequences) > 1:
            stderr.print(f"--- {index}", markup=False)
        typer.echo(sequence.text)


def print_stream(client: Client, asked: dict[str, Any]) -> str:
    """Print one sequence's pieces as they come and return its text; an interrupt cancels the request."""
    text = []
    with closing(client.generate_stream(**asked)) as chunks:
        try:
            for chunk in chunks:
                text.append(chunk.text)
                typer.echo(chunk.text, nl=False)
        finally:
            if text:
                typer.echo()
    return "".join(text)


def result_as_json(result: GenerationResult, seconds: float) -> dict[str, Any]:
    """Return a result as plain values."""
    return {
        "request_id": result.request_id,
        "build_id": result.build_id,
        "seconds": round(seconds, 4),
        "cost": None if result.cost is None else asdict(result.cost),
        "energy": None if result.energy is None else asdict(result.energy),
        **({"budget_warnings": result.budget_warnings} if result.budget_warnings else {}),
        "sequences": [
            {
                "text": sequence.text,
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
                **asdict(sequence.usage),
                **({"log_probs": sequence.log_probs} if sequence.log_probs else {}),
            }
            for sequence in result.sequences
        ],
    }
