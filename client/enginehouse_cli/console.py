"""What every command shares: where output goes, JSON, progress, and exit codes.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 nobody
answers (server, engine, ledger or remote store unavailable, overloaded, too slow), 130 interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from enginehouse_contract.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    EnginehouseError,
    EngineUnavailableError,
    LedgerUnavailableError,
    OverloadedError,
    RemoteStoreError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_INTERRUPTED: Final = 130

stdout: Final = Console(highlight=False, soft_wrap=True)
stderr: Final = Console(stderr=True, highlight=False, soft_wrap=True)

_UNAVAILABLE: Final = (
    EngineUnavailableError,
    OverloadedError,
    DeadlineExceededError,
    LedgerUnavailableError,
    RemoteStoreError,
)


def exit_code_of(error: EnginehouseError) -> int:
    """Return the exit code of an error."""
    is_unavailable = isinstance(error, _UNAVAILABLE) and not isinstance(error, BudgetExceededError)
    return EXIT_UNAVAILABLE if is_unavailable else EXIT_FAILED


def print_json(value: Any) -> None:
    """Print one JSON value on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")
    sys.stdout.flush()


def print_error(error: BaseException | str) -> None:
    """Print one line that says what is wrong."""
    text = " ".join(str(error).splitlines()) or type(error).__name__
    stderr.print(f"error: {text}", style="red", markup=False)


@dataclass(slots=True)
class Stopwatch:
    """Seconds since it was made."""

    started_s: float

    @classmethod
    def start(cls) -> Stopwatch:
        """Return one that runs from now."""
        return cls(time.perf_counter())

    @property
    def elapsed_s(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.started_s


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Show progress on stderr: a bar on a terminal, a line per stage elsewhere. Yields ``report(stage, fraction)``."""
    if not stderr.is_terminal:
        seen: set[str] = set()

        def report_line(stage: str, fraction: float) -> None:  # noqa: ARG001 - the bar uses it
            if stage not in seen:
                seen.add(stage)
                stderr.print(f"{title}: {stage}", markup=False)

        yield report_line
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - slow

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(title, total=1.0)

        def report(stage: str, fraction: float) -> None:
            bar.update(task, description=f"{title}: {stage}", completed=min(max(fraction, 0.0), 1.0))

        yield report
