"""The release book: releases, stages with their history, and the journal of the change that is under way.

One SQLite file. Everything that must change together changes in one transaction that is on the disk when it returns,
so whatever a kill leaves behind is a state that was meant. History and releases cannot be changed or deleted: triggers
refuse it.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.promotion.journal import Operation, Step
from enginehouse_builders.promotion.records import MOVES, Canary, Change, StageEvent, now
from enginehouse_contract.errors import ConfigurationError, PromotionError, refusal
from enginehouse_contract.release import Release, Stage, release_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

FILE_NAME: Final = "releases.db"

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS release (
    number INTEGER PRIMARY KEY AUTOINCREMENT, build_id TEXT NOT NULL, build_dir TEXT NOT NULL, model_name TEXT NOT NULL,
    parameters TEXT NOT NULL, created_at TEXT NOT NULL, created_by TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS history (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, who TEXT NOT NULL, stage TEXT NOT NULL,
    action TEXT NOT NULL, from_release INTEGER, to_release INTEGER NOT NULL REFERENCES release(number),
    gates TEXT NOT NULL, override TEXT NOT NULL, why TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS stage (name TEXT PRIMARY KEY, release INTEGER NOT NULL REFERENCES release(number));
CREATE TABLE IF NOT EXISTS loaded (
    release INTEGER PRIMARY KEY REFERENCES release(number), kept INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS operation (
    number INTEGER PRIMARY KEY AUTOINCREMENT, started_at TEXT NOT NULL, ended_at TEXT, step TEXT NOT NULL,
    outcome TEXT, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TRIGGER IF NOT EXISTS release_stays BEFORE UPDATE ON release BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS release_kept BEFORE DELETE ON release BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS history_stays BEFORE UPDATE ON history BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS history_kept BEFORE DELETE ON history BEGIN SELECT RAISE(ABORT, 'append-only'); END;
"""


class ReleaseBook:
    """The book of one ENGINEHOUSE_HOME; a context manager."""

    def __init__(self, home: Path) -> None:
        self.path = home / FILE_NAME
        try:
            home.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self.path, isolation_level=None, timeout=10.0)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise _unusable(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # ---- releases ----

    def add_release(
        self, build_id: str, build_dir: Path, model_name: str, parameters: Mapping[str, str], who: str
    ) -> Release:
        """Return the release of this build with these settings: the one there is, else a new one."""
        body = json.dumps(dict(parameters), sort_keys=True)
        with self._transaction() as database:
            row = database.execute(
                "SELECT number FROM release WHERE build_id = ? AND parameters = ? AND build_dir = ?"
                " ORDER BY number DESC LIMIT 1",
                (build_id, body, str(build_dir)),
            ).fetchone()
            if row is None:
                cursor = database.execute(
                    "INSERT INTO release (build_id, build_dir, model_name, parameters, created_at, created_by)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (build_id, str(build_dir), model_name, body, now(), who),
                )
                row = (cursor.lastrowid,)
        return self.release(int(row[0]))

    def release(self, number: int) -> Release:
        """Return a release; raise :class:`ConfigurationError` when there is none of that number."""
        for release in self._releases("WHERE number = ?", (number,)):
            return release
        known = ", ".join(release.name for release in self.releases()[:8]) or "none yet"
        raise ConfigurationError(f"there is no release {release_name(number)}; there are: {known}.")

    def find_release(self, reference: str) -> Release:
        """Return the release called ``r12`` (or ``12``); raise :class:`ConfigurationError` when there is none."""
        digits = reference.removeprefix("r")
        if not digits.isdecimal():
            raise ConfigurationError(refusal("release", "must be like r12", given=reference))
        return self.release(int(digits))

    def releases(self) -> list[Release]:
        """Return every release, newest first."""
        return self._releases("ORDER BY number DESC", ())

    def _releases(self, where: str, values: tuple[object, ...]) -> list[Release]:
        rows = self._read(f"SELECT number, build_id, build_dir, model_name, parameters FROM release {where}", values)  # noqa: S608 - our own text
        return [Release(row[0], row[1], Path(row[2]), row[3], json.loads(row[4])) for row in rows]

    def created(self) -> dict[int, tuple[str, str]]:
        """Return when each release was made, and by whom."""
        return {row[0]: (row[1], row[2]) for row in self._read("SELECT number, created_at, created_by FROM release")}

    # ---- stages ----

    def stage(self, name: Stage) -> Release | None:
        """Return the release a stage points at."""
        rows = self._read("SELECT release FROM stage WHERE name = ?", (name,))
        return self.release(rows[0][0]) if rows else None

    def history(self, stage: Stage | None = None) -> list[StageEvent]:
        """Return what happened to a stage, or to all, oldest first."""
        rows = self._read(
            "SELECT stage, action, from_release, to_release, who, why, override, gates, at, sequence FROM history"
            " WHERE ? IS NULL OR stage = ? ORDER BY sequence",
            (stage, stage),
        )
        names = ("stage", "action", "from_release", "to_release", "who", "why", "override", "gates", "at", "sequence")
        return [StageEvent(**{**dict(zip(names, row, strict=True)), "gates": json.loads(row[7])}) for row in rows]

    def previous_release(self, stage: Stage) -> Release | None:
        """Return the release that the stage pointed at before the one it points at now, passing over rolled-back ones.

        Moves are a path: a rollback to a release that was passed before takes back everything after it.
        """
        path: list[int] = []
        for event in self.history(stage):
            if event.action in MOVES:
                if event.action == "rollback" and event.to_release in path:
                    del path[path.index(event.to_release) + 1 :]
                elif not path or path[-1] != event.to_release:
                    path.append(event.to_release)
        return self.release(path[-2]) if len(path) > 1 else None

    def canary(self) -> Canary | None:
        """Return the canary that is on."""
        body = self.fact("canary")
        return Canary(**body) if body else None

    # ---- what the server has loaded, as far as we did it ----

    def loaded(self) -> dict[int, bool]:
        """Return the releases that promotions loaded and did not unload, and whether each is to be kept."""
        return {row[0]: bool(row[1]) for row in self._read("SELECT release, kept FROM loaded")}

    def set_loaded(self, release: Release) -> None:
        """Record that a release is about to be loaded."""
        with self._transaction() as database:
            database.execute("INSERT OR IGNORE INTO loaded VALUES (?, 0)", (release.number,))

    def set_kept(self, numbers: Sequence[int]) -> None:
        """Record which releases stay loaded though nothing points at them; those of before no longer do."""
        with self._transaction() as database:
            database.execute("UPDATE loaded SET kept = 0")
            database.executemany("UPDATE loaded SET kept = 1 WHERE release = ?", [(number,) for number in numbers])

    def restart(self, release: Release) -> None:
        """Record that a server starts with this release alone: a canary of the last one is over."""
        with self._transaction() as database:
            database.execute("DELETE FROM loaded")
            database.execute("INSERT INTO loaded VALUES (?, 0)", (release.number,))
            _set_fact(database, "canary", None)
            _set_fact(database, "canary_status", None)

    def expected_load_s(self) -> float | None:
        """Return how long a load should take: as long as the last one; None before the first."""
        seconds = self.fact("last_load_s")
        return None if seconds is None else float(seconds)

    def set_unloaded(self, release: Release) -> None:
        """Record that a release is unloaded."""
        with self._transaction() as database:
            database.execute("DELETE FROM loaded WHERE release = ?", (release.number,))

    # ---- the journal ----

    def begin(self, operation: Operation) -> Operation:
        """Write down what is about to be done; it is on the disk before anything is touched."""
        with self._transaction() as database:
            body = json.dumps(operation.body())
            cursor = database.execute(
                "INSERT INTO operation (started_at, step, body) VALUES (?, ?, ?)", (now(), operation.step.name, body)
            )
            return replace(operation, number=int(cursor.lastrowid or 0))

    def advance(self, operation: Operation, step: Step) -> Operation:
        """Write down how far it has come."""
        with self._transaction() as database:
            database.execute("UPDATE operation SET step = ? WHERE number = ?", (step.name, operation.number))
        return replace(operation, step=step)

    def commit(self, operation: Operation, change: Change) -> Operation:
        """Move the stage, append its history and advance the journal, all or nothing."""
        event = change.event
        what = (event.who, event.stage, event.action, event.from_release, event.to_release)
        with self._transaction() as database:
            database.execute(
                "INSERT INTO history (at, who, stage, action, from_release, to_release, gates, override, why)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (now(), *what, json.dumps(list(event.gates)), event.override, event.why),
            )
            if change.moves_stage:
                database.execute("INSERT OR REPLACE INTO stage VALUES (?, ?)", (event.stage, event.to_release))
            canary = None if change.canary is None else {**_plain(change.canary), "started_at": now()}
            _set_fact(database, "canary", canary)
            _set_fact(database, "canary_status", None)
            if operation.number:
                database.execute(
                    "UPDATE operation SET step = ? WHERE number = ?", (Step.COMMITTED.name, operation.number)
                )
        return replace(operation, step=Step.COMMITTED)

    def end(self, operation: Operation, outcome: str) -> None:
        """Write down that it is over, and how."""
        with self._transaction() as database:
            database.execute(
                "UPDATE operation SET ended_at = ?, outcome = ? WHERE number = ?", (now(), outcome, operation.number)
            )

    def unfinished(self) -> Operation | None:
        """Return the operation that was begun and not ended; there is at most one."""
        rows = self._read("SELECT number, step, body FROM operation WHERE ended_at IS NULL ORDER BY number LIMIT 1")
        return Operation.parse(rows[0][0], rows[0][1], json.loads(rows[0][2])) if rows else None

    # ---- small facts ----

    def fact(self, name: str) -> Any:
        """Return a stored value; None where there is none."""
        rows = self._read("SELECT value FROM fact WHERE name = ?", (name,))
        return json.loads(rows[0][0]) if rows else None

    def set_fact(self, name: str, value: Any) -> None:
        """Store a value."""
        with self._transaction() as database:
            _set_fact(database, name, value)

    # ---- the file ----

    def _read(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise _unusable(self.path, error) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise _unusable(self.path, error) from error


def _plain(canary: Canary) -> dict[str, Any]:
    return {
        "release": canary.release,
        "share": canary.share,
        "by": canary.by,
        "min_requests": canary.min_requests,
        "baseline": dict(canary.baseline),
    }


def _set_fact(database: sqlite3.Connection, name: str, value: Any) -> None:
    if value is None:
        database.execute("DELETE FROM fact WHERE name = ?", (name,))
    else:
        database.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, json.dumps(value)))


def _unusable(path: Path, error: Exception) -> PromotionError:
    return PromotionError(f"the release book {path} cannot be used ({error}); nothing was changed.")
