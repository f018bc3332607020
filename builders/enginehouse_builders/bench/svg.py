"""Small plots as inline SVG: one series of lines, steps or dots, axes with round ticks, colours from the page's CSS."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    Point = tuple[float, float]

WIDTH: Final = 560
HEIGHT: Final = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 12, 42
_NUM_TICKS: Final = 5
_HEADROOM: Final = 1.1  # names of limits have room above the data
_MAX_POINTS: Final = 1500  # more cannot be told apart


@dataclass(frozen=True, slots=True)
class Series:
    """Points and how they are drawn; ``is_muted`` for what is shown but not measured."""

    points: Sequence[Point]
    kind: Literal["line", "step", "dots", "crosses"] = "line"
    is_muted: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """A dashed line at a value of one axis, with its name."""

    axis: Literal["x", "y"]
    value: float
    name: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps ``low .. high`` to pixels."""

    low: float
    high: float
    from_px: float
    to_px: float

    def __call__(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return self.from_px + part * (self.to_px - self.from_px)


def plot(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    limits: Sequence[Limit] = (),
    x_max: float | None = None,
    y_max: float | None = None,
) -> str:
    """Return a plot as an SVG element; both axes begin at 0 and reach *x_max* and *y_max*, else what is drawn."""
    points = [point for one in series for point in one.points]
    if not points:
        return f'<p class="empty">{escape(title)}: nothing to show</p>'
    x_ticks = nice_ticks(x_max if x_max is not None else max(x for x, _ in points))
    y_ticks = nice_ticks(y_max if y_max is not None else _HEADROOM * max(y for _, y in points))
    x_scale = _Scale(0, x_max if x_max is not None else x_ticks[-1], _LEFT, WIDTH - _RIGHT)
    y_scale = _Scale(0, y_max if y_max is not None else y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">',
        *_axes(x_scale, y_scale, x_ticks, y_ticks, x_label, y_label),
        *(_draw(one, x_scale, y_scale) for one in series),
        *(_limit(limit, x_scale, y_scale) for limit in limits),
        "</svg>",
    ]
    return "\n".join(parts)


def nice_ticks(high: float) -> list[float]:
    """Return round numbers from 0 to at least *high*, about five of them.

    >>> nice_ticks(93.0)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    if not high > 0:
        return [0.0, 1.0]
    raw = high / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [round(index * step, 12) for index in range(math.ceil(high / step - 1e-9) + 1)]


def thin(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most about ``_MAX_POINTS`` points, evenly chosen, with the last."""
    stride = -(-len(points) // _MAX_POINTS)
    if stride <= 1:
        return points
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _axes(
    x_scale: _Scale, y_scale: _Scale, x_ticks: list[float], y_ticks: list[float], x_label: str, y_label: str
) -> list[str]:
    bottom, parts = HEIGHT - _BOTTOM, []
    for tick in y_ticks:
        if tick <= y_scale.high:
            y = y_scale(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        if tick <= x_scale.high:
            x = x_scale(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle_x, middle_y = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + bottom) / 2
    parts.append(f'<text class="label" x="{middle_x}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text class="label" x="14" y="{middle_y}" text-anchor="middle" transform="rotate(-90 14 {middle_y})">'
        f"{escape(y_label)}</text>"
    )
    return parts


def _draw(series: Series, x_scale: _Scale, y_scale: _Scale) -> str:
    tone = " muted" if series.is_muted else ""
    inside = [(x, y) for x, y in series.points if x <= x_scale.high and y <= y_scale.high]
    places = [(x_scale(x), y_scale(y)) for x, y in thin(inside)]
    if series.kind == "dots":
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places)
        return f'<g class="dots{tone}">{dots}</g>'
    if series.kind == "crosses":
        crosses = "".join(f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6" for x, y in places)
        return f'<path class="crosses" d="{crosses}"/>'
    if series.kind == "step":
        steps = [f"H{x:.1f}V{y:.1f}" for x, y in places[1:]]
    else:
        steps = [f"L{x:.1f} {y:.1f}" for x, y in places[1:]]
    start = f"M{places[0][0]:.1f} {places[0][1]:.1f}" if places else ""
    return f'<path class="line{tone}" d="{start}{"".join(steps)}"/>'


def _limit(limit: Limit, x_scale: _Scale, y_scale: _Scale) -> str:
    scale = x_scale if limit.axis == "x" else y_scale
    if not scale.low <= limit.value <= scale.high:
        return ""
    at, name = scale(limit.value), escape(limit.name)
    if limit.axis == "x":
        is_right = at > (WIDTH + _LEFT) / 2
        text_x, anchor = (at - 5, "end") if is_right else (at + 5, "start")
        line = f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        return f'{line}<text class="limit-name" x="{text_x:.1f}" y="{_TOP + 10}" text-anchor="{anchor}">{name}</text>'
    line = f'<line class="limit" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
    text = f'<text class="limit-name" x="{WIDTH - _RIGHT}" y="{at - 5:.1f}" text-anchor="end">{name}</text>'
    return line + text
