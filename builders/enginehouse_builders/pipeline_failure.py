"""What a failed build leaves for the one who looks into it: the spec, the log, and a script that fails the same way."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING, Any

import yaml

from enginehouse_builders.pipeline import LOG_FILE, REPRODUCE_FILE, SPEC_FILE, failed_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from enginehouse_builders.pipeline import Workspace
    from enginehouse_contract.errors import EnginehouseError


def explain(error: EnginehouseError, work: Workspace, spec: Mapping[str, Any]) -> EnginehouseError:
    """Write the script beside the log, and return an error of the same kind that names both.

    The script builds the same spec from its first step, in a state folder of its own on the same disk, so it can be run
    as often as needed and changes nothing in the store.
    """
    failed = failed_step(work)
    if failed is None:
        return error
    script = work.folder / REPRODUCE_FILE
    words = f"the step `{failed.step}` failed: {error}"
    try:
        (work.folder / SPEC_FILE).write_text(yaml.safe_dump(dict(spec), sort_keys=False), encoding="utf-8")
        script.write_text(_script(words, work), encoding="utf-8")
        script.chmod(0o755)
    except OSError:  # a full disk: what went wrong still counts
        return error
    located = (
        f"{error} The step `{failed.step}` failed; its log is {work.folder / LOG_FILE}, `sh {script}` fails again."
    )
    with contextlib.suppress(TypeError):  # a kind of error that is not made from words alone
        return type(error)(located)
    return error


def _script(words: str, work: Workspace) -> str:
    folder = work.folder.absolute()
    home, spec = shlex.quote(str(folder / "reproduce")), shlex.quote(str(folder / SPEC_FILE))
    comment = "\n".join(f"# {line}" for line in words.splitlines())
    lines = (
        "#!/bin/sh",
        comment,
        "# Builds again from the first step, in a state folder of its own; the store is not touched.",
        f"rm -rf {home}",
        f"ENGINEHOUSE_HOME={home} exec {shlex.quote(sys.executable)} -m enginehouse_cli build {spec}",
    )
    return "\n".join(lines) + "\n"
