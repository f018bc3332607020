"""Text that quantization looks at: the user's, or the samples that come with Enginehouse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginehouse_contract.errors import ConfigurationError, refusal

if TYPE_CHECKING:
    from enginehouse_builders.spec.model import Spec

_SHIPPED: Final = Path(__file__).with_name("calibration.txt")


def calibration_samples(spec: Spec) -> list[str]:
    """Return the samples of ``quantization.calibration``, in the file's order, at most as many as it says.

    Raises :class:`ConfigurationError` when the file cannot be read or holds none.
    """
    calibration = spec.quantization.calibration
    path = Path(calibration.data) if calibration.data else _SHIPPED
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        samples = [_sample(line, is_json=path.suffix in {".json", ".jsonl"}) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = "must be a text file of one sample a line, or JSON lines with `text`"
        hint = f"It could not be read: {error}."
        raise ConfigurationError(
            refusal("quantization.calibration.data", problem, given=str(path), hint=hint)
        ) from error
    if not samples:
        raise ConfigurationError(refusal("quantization.calibration.data", "holds no samples", given=str(path)))
    return samples[: calibration.num_samples]


def _sample(line: str, *, is_json: bool) -> str:
    return str(json.loads(line)["text"]) if is_json else line.strip()
