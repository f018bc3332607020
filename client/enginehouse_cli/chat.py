"""`enginehouse chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from enginehouse_cli.console import print_error, stderr, stdout
from enginehouse_cli.generate import print_stream
from enginehouse_cli.options import (
    MaxTokensOption,
    ModelOption,
    SeedOption,
    SpeculateOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    UrlOption,
    find_server,
)
from enginehouse_contract.errors import EnginehouseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from enginehouse_client import Client


def chat(
    url: UrlOption = None,
    system: Annotated[Optional[str], typer.Option("--system", help="A system message to begin with.")] = None,
    model: ModelOption = "tensorrt_llm_bls",
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    speculate: SpeculateOption = None,
) -> None:
    """Talk to the model; every turn is sent with all before it. An empty line or Ctrl-D ends the conversation."""
    from enginehouse_client import Client  # noqa: PLC0415

    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "model": model,
        "speculate": speculate,
    }
    with Client(find_server(url)) as client:
        if stdout.is_terminal:
            stderr.print("An empty line or Ctrl-D ends the conversation.", style="dim")
        while (line := _read_line()) is not None:
            messages.append({"role": "user", "content": line})
            answer = _answer(client, messages, options)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _read_line() -> str | None:
    try:
        line = input("> " if stdout.is_terminal else "")
    except EOFError:
        return None
    return line or None


def _answer(client: Client, messages: list[dict[str, str]], options: Mapping[str, object]) -> str | None:
    """Print the model's answer and return it; None when it was refused or interrupted, so that the talk goes on."""
    try:
        return print_stream(client, {"messages": messages, **options})
    except EnginehouseError as error:
        print_error(error)
    except typer.Exit:
        pass
    return None
