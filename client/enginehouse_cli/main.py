"""The command `enginehouse`: one module per command, errors in one line, stable exit codes."""

from __future__ import annotations

import sys

import typer
from typer.exceptions import TyperException

from enginehouse_cli import budget, build, builds, chat, cost, demo, doctor, generate, prices, serve, usage
from enginehouse_cli.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    exit_code_of,
    explain_unexpected,
    print_error,
)
from enginehouse_contract.errors import EnginehouseError

app = typer.Typer(
    name="enginehouse",
    help="Build, prove, promote and meter LLM engines on Triton Inference Server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("build")(build.build)
app.command("builds")(builds.builds)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("usage")(usage.usage)
app.command("cost")(cost.cost)
app.add_typer(budget.app, name="budget")
app.add_typer(prices.app, name="prices")


def main() -> None:
    """Run the command line and exit; a user never sees a traceback."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = app(args=arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except TyperException as error:
        print_error(error.format_message())
        code = EXIT_USAGE
    except typer.Exit as error:
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except EnginehouseError as error:
        print_error(error)
        code = exit_code_of(error)
    except BrokenPipeError:
        code = 0  # whoever read our output has seen enough
    except Exception as error:  # noqa: BLE001 - the last line of defence against a traceback
        explain_unexpected(error, "Please report it, with `enginehouse doctor --json`.")
        code = EXIT_FAILED
    return code
