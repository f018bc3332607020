"""YAML with the line of every key, so that an error can say where it is; a key named twice is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

from enginehouse_builders.spec.problems import Problem, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

    Location = tuple[str | int, ...]

_MAX_DEPTH: Final = 16
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str, where: str) -> tuple[dict[str, Any], dict[Location, int]]:
    """Parse one YAML mapping; return it with the line (from 1) of each of its keys and items by location.

    Raises :class:`SpecError` for text that is not YAML, not one mapping, or names a key twice.
    """
    try:
        _refuse_tricks(text, where)
        node = yaml.compose(text, Loader=_Loader)
        if not isinstance(node, yaml.MappingNode):
            hint = "write `key: value` lines; `enginehouse spec init MODEL` makes a file to start from"
            raise SpecError(where, [Problem("", f"a spec is a YAML mapping; {hint}.", 1)])
        lines: dict[Location, int] = {}
        problems = []
        for location, line in _walk(node, ()):
            if location in lines:
                name = _dotted(location)
                problems.append(Problem(name, f"`{name}` is named twice, first on line {lines[location]}.", line))
            lines[location] = line
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - it is the safe loader, in C where there is one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = Problem("", f"not readable as YAML: {error.problem}.", mark.line + 1 if mark else None)
        raise SpecError(where, [problem]) from error
    except yaml.YAMLError as error:
        raise SpecError(where, [Problem("", f"not readable as YAML: {' '.join(str(error).split())}.")]) from error
    if problems:
        raise SpecError(where, problems)
    return value, lines


def line_of(lines: dict[Location, int], location: Location) -> int | None:
    """Return the line of *location*, or of the nearest part around it that stands in the file."""
    for end in range(len(location), 0, -1):
        if location[:end] in lines:
            return lines[location[:end]]
    return None


def _refuse_tricks(text: str, where: str) -> None:
    """Aliases (which can be endless, or grow without bound) and nesting that no spec has."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, yaml.AliasEvent):
            raise SpecError(where, [Problem("", "a spec has no YAML aliases (`*name`); write the value out.", line)])
        if depth > _MAX_DEPTH:
            raise SpecError(where, [Problem("", f"is nested more than {_MAX_DEPTH} deep, which no spec is.", line)])


def _walk(node: yaml.Node, location: Location) -> Iterator[tuple[Location, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*location, str(key.value))
            yield inner, key.start_mark.line + 1
            yield from _walk(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*location, index), item.start_mark.line + 1
            yield from _walk(item, (*location, index))


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)
