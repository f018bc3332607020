"""Removing builds that nothing needs, and what builds at work left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from enginehouse_builders.store import WORK_PREFIX, list_builds
from enginehouse_contract.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from enginehouse_builders.store import StoredBuild

_REMOVED_PREFIX: Final = ".removing-"


@dataclass(frozen=True, slots=True)
class Garbage:
    """What may go: builds, and folders of builds at work that no process holds."""

    builds: tuple[StoredBuild, ...]
    leftovers: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        folders = [build.build_dir for build in self.builds] + list(self.leftovers)
        return sum(_num_bytes(folder) for folder in folders)


def find_garbage(store_dir: Path, protected: Collection[str], num_kept: int) -> Garbage:
    """Return what may be removed.

    Args:
        store_dir: The store.
        protected: Ids of builds that must stay, whatever their age: those that releases and stages point at.
        num_kept: Newest builds of each model name that stay besides.
    """
    seen: dict[str, int] = {}
    builds = []
    for build in list_builds(store_dir):
        name = build.manifest.model_name
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > num_kept and build.manifest.build_id not in protected:
            builds.append(build)
    folders = [*store_dir.glob(f"{WORK_PREFIX}*"), *store_dir.glob(f"{_REMOVED_PREFIX}*")]
    return Garbage(
        tuple(builds), tuple(sorted(folder for folder in folders if folder.is_dir() and not _is_held(folder)))
    )


def remove(garbage: Garbage) -> None:
    """Remove it; each build disappears in one step, so that nobody finds half of one.

    Raises :class:`BuildError` when something cannot be removed.
    """
    try:
        for build in garbage.builds:
            aside = build.build_dir.with_name(_REMOVED_PREFIX + build.build_dir.name)
            build.build_dir.rename(aside)
            shutil.rmtree(aside)
        for folder in garbage.leftovers:
            if not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise BuildError(f"{error.filename} cannot be removed ({error.strerror or error}).") from error


def _is_held(folder: Path) -> bool:
    """Whether a process builds in a folder."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
