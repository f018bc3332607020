"""What a server's log says about why it did not start."""

from __future__ import annotations

import contextlib
import re
from typing import Final

_LOG_LINE: Final = re.compile(r"^[EWI]\d{4} [\d:.]+ +\d+ ([\w.]+:\d+)\] (.*)$")


def failure_in_log(log_file: str) -> str:
    """Return the message of the first model failure in a server's log, without traceback and source positions."""
    with contextlib.suppress(OSError), open(log_file, encoding="utf-8", errors="replace") as log:  # noqa: PTH123
        text = log.read()
        failed = re.search(r"failed to load '([^']+)' version \d+: \w+: (.*)", text)
        if failed:
            message = failed[2].split(r"\n\nAt:")[0].strip().strip('"')
            message = re.sub(r"^\w*(?:Error|Exception): ", "", message)
            return f"model `{failed[1]}`: {message}"
        refused = re.search(r"^error: creating server: [\w ]+ - (.*)$", text, re.MULTILINE)
        if refused:
            return refused[1]
        errors = [match[2] for line in text.splitlines() if line.startswith("E") and (match := _LOG_LINE.match(line))]
        return errors[-1] if errors else ""
    return ""
