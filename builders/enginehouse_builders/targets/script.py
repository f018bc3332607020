"""The text of a generated script: a template with the plan's values in it as Python literals."""

from __future__ import annotations

import pprint
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from enginehouse_builders.targets.emitted import ENGINE_VERSION

if TYPE_CHECKING:
    from enginehouse_builders.targets.emitted import TargetPlan

_TEMPLATES: Final = Path(__file__).with_name("templates")
_MODEL_HELP: Final = "the model's folder"


def render_script(plan: TargetPlan, record: dict[str, Any]) -> str:
    """Return the script that builds *plan*; *record* is what its manifest will repeat."""
    values = {
        "NAME": record["model_name"],
        "VERSION": metadata.version("enginehouse"),
        "ENGINE_VERSION": ENGINE_VERSION,
        "MODEL_HELP": _MODEL_HELP,
        "SETTINGS": _literal(plan.settings),
        "RECORD": _literal(record),
        "RECORDING": _template("record.py.txt"),
        **{placeholder: _template(name) for placeholder, name in plan.fragments.items()},
    }
    text = _template(f"{plan.target}.py.txt")
    for placeholder, value in values.items():
        text = text.replace(f"@@{placeholder}@@", value)
    return text


def _template(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _literal(value: dict[str, Any]) -> str:
    return pprint.pformat(value, width=100, sort_dicts=False)
