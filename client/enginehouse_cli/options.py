"""Command-line options that several commands take, declared once."""

from __future__ import annotations

from typing import Annotated, Any, Final, Optional

import typer

from enginehouse_cli.console import print_json
from enginehouse_contract.errors import EngineUnavailableError
from enginehouse_contract.settings import load_settings
from enginehouse_contract.tensors import TENSORRT_LLM_BLS

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
UrlOption = Annotated[
    Optional[str],
    typer.Option(
        "--url", help="Server: host:port for gRPC, http://host:port for HTTP. Default: the one that runs here."
    ),
]
ModelOption = Annotated[str, typer.Option("--model", help="Triton model to ask.")]
DEFAULT_MODEL: Final = TENSORRT_LLM_BLS.name
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", help="At most this many new tokens.")]
TemperatureOption = Annotated[Optional[float], typer.Option("--temperature", help="0 is greedy.")]
TopKOption = Annotated[Optional[int], typer.Option("--top-k", help="Sample from this many; 0 is all.")]
TopPOption = Annotated[Optional[float], typer.Option("--top-p", help="Sample from this much mass.")]
SeedOption = Annotated[Optional[int], typer.Option("--seed", help="The same seed gives the same text.")]
StopOption = Annotated[list[str], typer.Option("--stop", help="Stop before this text; may be repeated.")]
BadWordOption = Annotated[list[str], typer.Option("--bad-word", help="Never say this; may be repeated.")]
MinTokensOption = Annotated[Optional[int], typer.Option("--min-tokens", help="At least this many new tokens.")]
RepetitionPenaltyOption = Annotated[
    Optional[float], typer.Option("--repetition-penalty", help="Above 1: less of what was said.")
]
PresencePenaltyOption = Annotated[
    Optional[float], typer.Option("--presence-penalty", help="Above 0: less of what was said.")
]
FrequencyPenaltyOption = Annotated[
    Optional[float], typer.Option("--frequency-penalty", help="Above 0: less of what was said, the more often.")
]
TenantOption = Annotated[Optional[str], typer.Option("--tenant", help="Who asks, for fair shares and accounting.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Give up after this many seconds.")]
ServiceOption = Annotated[
    Optional[str], typer.Option("--service", help="One of the services that share the host. Default: production.")
]
SpeculateOption = Annotated[
    Optional[str],
    typer.Option("--speculate", help="Speculative decoding: off, ngram or draft. Default: as the server is set."),
]


def find_server(url: str | None) -> str:
    """Return the address to ask: the one given, else that of the server running on this state folder.

    Raises :class:`EngineUnavailableError` when none runs.
    """
    if url:
        return url
    from enginehouse_backends.server.supervisor import read_state  # noqa: PLC0415 - commands import what they use

    home = load_settings().home
    state = read_state(home)
    if state is None:
        msg = f"no server runs on {home}; start one with `enginehouse serve`, or name one with --url."
        raise EngineUnavailableError(msg)
    return state.grpc_url


def show(value: Any, *, as_json: bool, text: str) -> None:
    """Print a result as JSON or as text."""
    if as_json:
        print_json(value)
    else:
        typer.echo(text)
