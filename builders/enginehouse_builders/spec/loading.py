"""Reading a spec: YAML to typed values, with every problem named by field, line, limit, value given and what to do."""

from __future__ import annotations

import difflib
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from enginehouse_builders.plan.reading import detect_format
from enginehouse_builders.spec.compatibility import refusals
from enginehouse_builders.spec.lines import line_of, read_yaml
from enginehouse_builders.spec.model import SourceFormat, Spec
from enginehouse_builders.spec.problems import Problem, SpecError
from enginehouse_contract.errors import ModelSourceError, refusal

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    Location = tuple[str | int, ...]

_MAX_SPEC_BYTES: Final = 1 << 20
_BOUNDS: Final = {"greater_than_equal": "ge", "greater_than": "gt", "less_than_equal": "le", "less_than": "lt"}
_AT_LEAST: Final = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_KINDS: Final = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "decimal_parsing": "must be a decimal in quotes",
    "decimal_type": "must be a decimal in quotes",
}
_PATTERN_HINT: Final = {
    "name": "Letters, digits, dots, dashes and underscores only.",
    "device": "Letters, digits, dots, dashes and underscores only.",
    "currency": "Three capital letters (ISO 4217), such as USD.",
    "sha256": "64 hexadecimal digits, in lower case.",
}


def load_spec(path: Path) -> Spec:
    """Read the spec at *path*, check it, and return it with its relative paths made absolute.

    Raises :class:`SpecError`, whose ``problems`` hold everything that is wrong: syntax, unknown keys with the nearest
    known one, values out of bounds, options that a target refuses or that conflict, and files that are not there.
    """
    spec, lines = _parse(_read(path), str(path))
    problems = [Problem(found.field, found.message, line_of(lines, _location(found.field))) for found in refusals(spec)]
    resolved = _with_absolute_paths(spec, path.absolute().parent)
    problems += [
        Problem(field, message, line_of(lines, _location(field))) for field, message in _missing_files(resolved)
    ]
    if problems:
        raise SpecError(str(path), problems)
    return resolved


def parse_spec(text: str, where: str = "spec") -> Spec:
    """Parse a spec's text, without looking at files or at what targets refuse.

    Raises :class:`SpecError` with every problem of syntax, of names and of values.
    """
    return _parse(text, where)[0]


def _parse(text: str, where: str) -> tuple[Spec, dict[Location, int]]:
    raw, lines = read_yaml(text, where)
    try:
        return Spec.model_validate(raw), lines
    except ValidationError as error:
        problems = [_problem(details, lines) for details in error.errors(include_url=False)]
        raise SpecError(where, sorted(problems, key=lambda problem: problem.line or 0)) from error


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise SpecError(str(path), [Problem("", "is a folder; give the spec's YAML file.")])
        if path.stat().st_size > _MAX_SPEC_BYTES:
            raise SpecError(str(path), [Problem("", "is larger than 1 MiB; a spec is a short YAML file.")])
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        hint = "make one with `enginehouse spec init MODEL`"
        raise SpecError(str(path), [Problem("", f"there is no such file; {hint}.")]) from error
    except UnicodeDecodeError as error:
        problem = Problem("", f"is not text (UTF-8) at byte {error.start}; a spec is a YAML file.")
        raise SpecError(str(path), [problem]) from error
    except OSError as error:
        raise SpecError(str(path), [Problem("", f"cannot be read ({error.strerror or error}).")]) from error


def _problem(details: ErrorDetails, lines: dict[Location, int]) -> Problem:
    location = details["loc"]
    field = ".".join(str(part) for part in location)
    return Problem(field, _worded(details, location, field or "spec"), line_of(lines, location))


def _worded(details: ErrorDetails, location: Location, field: str) -> str:  # noqa: PLR0911 - one line per kind
    kind, given, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(location, field)
    if kind == "missing":
        return refusal(field, "is missing", hint="Add it; it has no default.")
    if kind in {"enum", "literal_error"}:
        return _not_a_choice(str(context["expected"]), given, field)
    if kind in _BOUNDS:
        bound = _BOUNDS[kind]
        return refusal(field, f"must be {_AT_LEAST[bound]} {context[bound]}", given=given)
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        keys = ", ".join(_fields_at(location))
        return refusal(field, "must be a mapping", given=given, hint=f"Its keys: {keys}." if keys else "")
    if kind == "string_pattern_mismatch":
        return refusal(
            field, "has characters it may not have", given=given, hint=_PATTERN_HINT.get(str(location[-1]), "")
        )
    if kind == "value_error":
        text = str(context["error"])
        return f"{text}." if "`" in text else refusal(field, text, given=given)
    return refusal(field, _KINDS.get(kind, details["msg"].lower()), given=given)


def _unknown_key(location: Location, field: str) -> str:
    known = _fields_at(location[:-1])
    nearest = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.6)
    elsewhere = [path for path in _all_fields() if path.rsplit(".", 1)[-1] == str(location[-1])]
    if elsewhere:
        advice = f"It belongs under `{elsewhere[0]}`."
    elif nearest:
        advice = f"Did you mean `{nearest[0]}`?"
    else:
        advice = f"Known here: {', '.join(known)}."
    return f"`{field}` is not a key of a spec. {advice}"


def _not_a_choice(expected: str, given: object, field: str) -> str:
    choices = [choice.strip(" '") for part in expected.split(",") for choice in part.split(" or ")]
    nearest = difflib.get_close_matches(str(given), choices, n=1, cutoff=0.6)
    hint = f"Did you mean `{nearest[0]}`?" if nearest else ""
    return refusal(field, f"must be one of {', '.join(choices)}", given=given, hint=hint)


def _location(field: str) -> Location:
    return tuple(int(part) if part.isdigit() else part for part in field.split("."))


def _fields_at(location: Location) -> list[str]:
    """The keys that a spec knows at a location; none where it is not a part of its own."""
    part: type[BaseModel] | None = Spec
    for name in location:
        part = _part_of(part, str(name)) if part is not None else None
    return list(part.model_fields) if part is not None else []


def _part_of(part: type[BaseModel], name: str) -> type[BaseModel] | None:
    info = part.model_fields.get(name)
    annotation: Any = info.annotation if info else None
    options = get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else (annotation,)
    return next((one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _all_fields(part: type[BaseModel] = Spec, prefix: str = "") -> list[str]:
    names = []
    for name in part.model_fields:
        names.append(prefix + name)
        inner = _part_of(part, name)
        if inner is not None:
            names += _all_fields(inner, f"{prefix}{name}.")
    return names


def _with_absolute_paths(spec: Spec, folder: Path) -> Spec:
    """Resolve paths against the spec's own folder, so that it can be read from anywhere."""

    def absolute(text: str) -> str:
        return str(folder / Path(text).expanduser())

    calibration = spec.quantization.calibration
    update: dict[str, Any] = {"model": spec.model.model_copy(update={"source": absolute(spec.model.source)})}
    if calibration.data:
        changed = calibration.model_copy(update={"data": absolute(calibration.data)})
        update["quantization"] = spec.quantization.model_copy(update={"calibration": changed})
    if spec.speculation.draft_model:
        draft = absolute(spec.speculation.draft_model)
        update["speculation"] = spec.speculation.model_copy(update={"draft_model": draft})
    if spec.lora:
        adapters = tuple(absolute(adapter) for adapter in spec.lora.adapters)
        update["lora"] = spec.lora.model_copy(update={"adapters": adapters})
    if spec.gates.prompts:
        update["gates"] = spec.gates.model_copy(update={"prompts": absolute(spec.gates.prompts)})
    return spec.model_copy(update=update)


def _format_of(source: Path) -> SourceFormat | None:
    """What the files are; None where they do not tell, which reading the model will say better."""
    try:
        return detect_format(source)
    except ModelSourceError:
        return None


def _missing_files(spec: Spec) -> list[tuple[str, str]]:
    named = [("model.source", spec.model.source)]
    named += [("quantization.calibration.data", text) for text in (spec.quantization.calibration.data,) if text]
    named += [("speculation.draft_model", text) for text in (spec.speculation.draft_model,) if text]
    named += [("gates.prompts", text) for text in (spec.gates.prompts,) if text]
    named += [(f"lora.adapters.{index}", text) for index, text in enumerate(spec.lora.adapters if spec.lora else ())]
    hint = "Put it there, or change the path; relative paths start at the spec's own folder."
    return [
        (field, refusal(field, "names nothing that is there", given=text, hint=hint))
        for field, text in named
        if not Path(text).exists()
    ]
