"""The steps of a build, each with a status on disk as it ends, so that a killed or failed build goes on where it was.

A build at work is one hidden folder of the store: ``steps.json`` (statuses), ``build.log``, ``out/`` (what becomes the
build) and files that pass from step to step. Its lock is its process's: gone when that is, however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import traceback
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from enginehouse_builders.store import WORK_PREFIX, folder_of, store_errors
from enginehouse_contract.errors import EnginehouseError
from enginehouse_contract.manifest import FileRecord, sha256_of_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    Progress = Callable[[str, float], None]

Step = Literal["plan", "fetch", "convert", "quantize", "compile", "record"]
Outcome = Literal["running", "done", "skipped", "failed"]

STEPS: Final[tuple[Step, ...]] = get_args(Step)
REPRODUCE_FILE: Final = "reproduce.sh"
SPEC_FILE: Final = "spec.yaml"
LOG_FILE: Final = "build.log"
OUT: Final = "out"
_STEPS_FILE: Final = "steps.json"
_WAIT_S: Final = 0.2  # between looks at a build that another process makes
_ENDED: Final = ("done", "skipped")


@dataclass(frozen=True, slots=True)
class StepStatus:
    """What became of one step: its outcome, seconds, a sentence, and the files it left, by path in the work folder."""

    step: Step
    outcome: Outcome
    seconds: float = 0.0
    detail: str = ""
    outputs: dict[str, FileRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step returns: a sentence for the log, the files it made, and whether there was nothing to do."""

    detail: str
    outputs: tuple[str, ...] = ()
    skipped: bool = False


class Workspace:
    """The folder of one build at work; make one with :func:`workspace`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / OUT
        self.out.mkdir(exist_ok=True)
        self._statuses = self._resumable()

    @property
    def statuses(self) -> tuple[StepStatus, ...]:
        """What has been recorded so far, in the order of the steps."""
        return tuple(self._statuses[step] for step in STEPS if step in self._statuses)

    def outputs(self) -> dict[str, FileRecord]:
        """Return every file that steps have made, by path in the work folder."""
        return {name: record for status in self.statuses for name, record in status.outputs.items()}

    def log(self, text: str) -> None:
        """Append to the build's log, each line with the time (UTC)."""
        now = datetime.now(tz=timezone.utc).isoformat(timespec="milliseconds")
        with (self.folder / LOG_FILE).open("a", encoding="utf-8") as stream:
            stream.writelines(f"{now} {line}\n" for line in text.rstrip("\n").splitlines())

    def has_ended(self, step: Step) -> bool:
        """Return whether a step need not be done again."""
        return step in self._statuses and self._statuses[step].outcome in _ENDED

    def record(self, status: StepStatus) -> None:
        """Save a status: on disk, with the files it names, when this returns."""
        for name in status.outputs:
            _to_disk(self.folder / name)
        self._statuses[status.step] = status
        draft = self.folder / f".{_STEPS_FILE}"
        draft.write_text(json.dumps([asdict(one) for one in self.statuses], indent=1), encoding="utf-8")
        _to_disk(draft)
        draft.replace(self.folder / _STEPS_FILE)

    def _resumable(self) -> dict[Step, StepStatus]:
        """The steps that ended in an earlier run, up to the first whose files are not as it left them."""
        try:
            rows: list[dict[str, Any]] = json.loads((self.folder / _STEPS_FILE).read_text(encoding="utf-8"))
            found = {row["step"]: _status(row) for row in rows}
        except (OSError, ValueError, TypeError, KeyError):
            return {}
        kept: dict[Step, StepStatus] = {}
        for step in STEPS:
            status = found.get(step)
            if status is None or status.outcome not in _ENDED or not self._is_whole(status):
                break
            kept[step] = status
        return kept

    def _is_whole(self, status: StepStatus) -> bool:
        return all(_is_file(self.folder / name, record) for name, record in status.outputs.items())


@contextmanager
def workspace(
    store_dir: Path, build_id: str, is_built: Callable[[], bool], waiting: Callable[[], None]
) -> Iterator[Workspace | None]:
    """Hold the work folder of a build; while another process holds it, call *waiting* and wait.

    Yields None where the build turned out to be there, by *is_built*: the other process made it. The folder stays when
    the block fails, to be resumed, and goes when it ends well. Raises :class:`BuildError` when it cannot be written.
    """
    folder = store_dir / f"{WORK_PREFIX}{folder_of(store_dir, build_id).name}"
    with store_errors(store_dir):
        descriptor = _lock(folder, is_built, waiting)
        if descriptor is None:
            yield None
            return
        try:
            yield Workspace(folder)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def run_steps(
    work: Workspace, actions: Mapping[Step, Callable[[Callable[[float], None]], StepResult]], report: Progress
) -> None:
    """Do the steps that are not done yet, in order; each action gets a function that takes its share done.

    A step that fails is recorded and logged with its traceback, and its error passes on.
    """
    for index, step in enumerate(STEPS):
        if step not in actions:
            continue
        if work.has_ended(step):
            work.log(f"{step}: ended in an earlier run")
            continue
        report(step, index / len(STEPS))
        work.log(f"{step}: begins")
        work.record(StepStatus(step, "running"))
        started_s = time.monotonic()
        try:
            result = actions[step](lambda share, at=index, name=step: report(name, (at + share) / len(STEPS)))  # type: ignore[misc]  # mypy does not infer a lambda with defaults
        except BaseException as error:
            with contextlib.suppress(OSError):  # a full disk must not hide the first error
                _record_failure(work, step, error, time.monotonic() - started_s)
            raise
        outputs = {name: _file_record(work.folder / name) for name in result.outputs}
        seconds = round(time.monotonic() - started_s, 3)
        outcome: Outcome = "skipped" if result.skipped else "done"
        work.record(StepStatus(step, outcome, seconds, result.detail, outputs))
        work.log(f"{step}: {outcome} in {seconds:.3f} s: {result.detail}")


def failed_step(work: Workspace) -> StepStatus | None:
    """Return the step that failed, if one did."""
    return next((status for status in work.statuses if status.outcome == "failed"), None)


def _record_failure(work: Workspace, step: Step, error: BaseException, seconds: float) -> None:
    words = " ".join(str(error).split()) or type(error).__name__
    is_expected = isinstance(error, EnginehouseError)
    work.log(f"{step}: failed: {words}" if is_expected else "".join(traceback.format_exception(error)))
    work.record(StepStatus(step, "failed", round(seconds, 3), words))


def _lock(folder: Path, is_built: Callable[[], bool], waiting: Callable[[], None]) -> int | None:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its owner ended just now
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(folder, descriptor):
                    if not is_built():
                        return descriptor
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(descriptor)
                    return None
            except BlockingIOError:
                waiting()
                time.sleep(_WAIT_S)
            os.close(descriptor)


def _is_same(folder: Path, descriptor: int) -> bool:
    """Whether a folder is still the one that was opened, rather than removed, or removed and made anew."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _status(row: dict[str, Any]) -> StepStatus:
    return StepStatus(**{**row, "outputs": {name: FileRecord(**one) for name, one in row["outputs"].items()}})


def _file_record(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, sha256_of_file(path))


def _is_file(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.num_bytes and sha256_of_file(path) == record.sha256


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
