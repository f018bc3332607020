"""`enginehouse chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from enginehouse_cli.console import print_error, print_json, stderr
from enginehouse_cli.generate import print_stream
from enginehouse_cli.options import (
    DEFAULT_MODEL,
    JsonFlag,
    MaxTokensOption,
    ModelOption,
    RepetitionPenaltyOption,
    SeedOption,
    SpeculateOption,
    TemperatureOption,
    TenantOption,
    TimeoutOption,
    TopKOption,
    TopPOption,
    UrlOption,
    find_server,
)
from enginehouse_contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from enginehouse_client import Client


def chat(
    url: UrlOption = None,
    system: Annotated[Optional[str], typer.Option("--system", help="A system message to begin with.")] = None,
    model: ModelOption = DEFAULT_MODEL,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    repetition_penalty: RepetitionPenaltyOption = None,
    speculate: SpeculateOption = None,
    tenant: TenantOption = None,
    timeout: TimeoutOption = 600.0,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Talk to the model; every turn is sent with all before it. An empty line or Ctrl-D ends the conversation.

    Ctrl-C cancels the answer on the server and ends the conversation. Lines may also come from a pipe; with --json the
    whole conversation is printed at its end.
    """
    from enginehouse_client import Client  # noqa: PLC0415 - commands import what they use

    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "speculate": speculate,
        "tenant": tenant,
        "model": model,
        "timeout_s": timeout,
    }
    with Client(find_server(url)) as client:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, PLC0415 - gives input() line editing and history
            stderr.print("An empty line or Ctrl-D ends the conversation.", style="dim")
        while (line := _read_line()) is not None:
            messages.append({"role": "user", "content": line})
            answer = _answer(client, {"messages": messages, **options}, as_json=as_json)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})
    if as_json:
        print_json({"messages": messages})


def _read_line() -> str | None:
    if sys.stdin.isatty():
        try:
            return input("> " if sys.stdout.isatty() else "") or None
        except EOFError:
            stderr.print()
            return None
    return sys.stdin.readline().rstrip("\n") or None


def _answer(client: Client, asked: dict[str, Any], *, as_json: bool) -> str | None:
    """Print the model's answer and return it; None where a person may put a refused question differently."""
    try:
        return client.generate(**asked).text if as_json else print_stream(client, asked)
    except InvalidRequestError as error:
        if not sys.stdin.isatty():
            raise
        print_error(error)
    return None
