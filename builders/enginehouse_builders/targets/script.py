"""The text of a generated script: a template with the plan's values in it as Python literals."""

from __future__ import annotations

import json
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


def _literal(value: Any, indent: str = "") -> str:
    """Return a Python literal; a dictionary has a line for each of its items."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item, indent) for item in value) + "]"
    if not isinstance(value, dict) or not value:
        return repr(value)
    inner = indent + "    "
    items = [f"{inner}{_literal(key)}: {_literal(item, inner)},\n" for key, item in value.items()]
    return "{\n" + "".join(items) + indent + "}"
