"""The command `enginehouse`: one module per command, errors in one line, stable exit codes."""

from __future__ import annotations

import io
import os
import sys

import typer
from typer.exceptions import TyperException

from enginehouse_cli import (
    bench,
    budget,
    build,
    builds,
    chat,
    cost,
    demo,
    doctor,
    fleet,
    gate,
    generate,
    plan,
    prices,
    promote,
    ready,
    releases,
    serve,
    services,
    spec,
    stage,
    usage,
)
from enginehouse_cli.console import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    exit_code_of,
    print_error,
)
from enginehouse_cli.crash import write_crash_log
from enginehouse_contract.errors import EnginehouseError

app = typer.Typer(
    name="enginehouse",
    help="Build, prove, promote and meter LLM engines on Triton Inference Server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(spec.app, name="spec")
app.command("plan")(plan.plan)
app.command("build")(build.build)
app.add_typer(builds.app, name="builds")
app.command("serve")(serve.serve)
app.command("promote")(promote.promote)
app.command("rollback")(promote.rollback)
app.command("releases")(releases.releases)
app.add_typer(stage.app, name="stage")
app.add_typer(services.app, name="services")
app.add_typer(fleet.app, name="fleet")
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("ready")(ready.ready)
app.command("usage")(usage.usage)
app.command("cost")(cost.cost)
app.command("gate")(gate.gate)
app.add_typer(bench.app, name="bench")
app.add_typer(budget.app, name="budget")
app.add_typer(prices.app, name="prices")


def main() -> None:
    """Run the command line and exit; a user never sees a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = app(args=arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except TyperException as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # that one has printed the help already
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
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}" if error.filename else error)
        code = EXIT_FAILED
    except UnicodeDecodeError as error:
        print_error(f"the input is not valid UTF-8 at byte {error.start}.")
        code = EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the last line of defence against a traceback
        log = write_crash_log(error)
        where = f"the details are in {log}" if log else "no log could be written"
        print_error(f"internal error ({type(error).__name__}); {where}. Please report it.")
        code = EXIT_FAILED
    return code
