"""Line charts as inline SVG: values, their scale, and what the template draws.

The lines are drawn once, in units of the whole chart (0 to 1000 on both axes). Zooming changes the
part of these units that is visible and the labels of the axes, in ``templates/chart.js``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Point = tuple[float, float]
Shape = Literal["kill", "resume", "difference", "save"]

UNITS = 1000
MAX_POINTS = 4000  # of one chart: more than a screen has columns

_MARGIN = 0.04  # above and below the lines, as a part of the range


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        name: for the legend.
        points: ascending in x; a y that is not finite interrupts the line.
        is_wide: drawn wide and pale, below the others.
    """

    name: str
    points: tuple[Point, ...]
    is_wide: bool = False


@dataclass(frozen=True)
class Mark:
    """An event at one x.

    Args:
        x: where it is.
        shape: what it is drawn as.
        text: what it means.
    """

    x: float
    shape: Shape
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart before it is drawn.

    Args:
        title: the caption.
        summary: what the chart shows, for a reader who does not see it.
        x_label: the name and unit of the x axis.
        y_label: the name and unit of the y axis.
        lines: without one that has a point, nothing is drawn.
        marks: events.
        has_dots: whether every point is drawn as a dot, too, but for wide lines.
        from_zero: whether the y axis begins at 0.
    """

    title: str
    summary: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    has_dots: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Drawing:
    """A chart in drawing units.

    Args:
        chart: what is drawn.
        paths: the ``d`` of each line's path.
        dots: the positions of each line's points, where the chart has dots.
        marks: each mark with its position.
        data: the range of both axes and the points of each line, as JSON.
    """

    chart: Chart
    paths: tuple[str, ...]
    dots: tuple[tuple[Point, ...], ...]
    marks: tuple[tuple[Mark, float], ...]
    data: str


def drawn(chart: Chart) -> Drawing | None:
    """The chart in drawing units; None when no line has a finite point."""
    budget = MAX_POINTS // max(1, len(chart.lines))
    lines = [thinned(line.points, max_points=budget) for line in chart.lines]
    finite = [point for points in lines for point in points if math.isfinite(point[1])]
    if not finite:
        return None
    x_range = _padded([x for x, _ in finite] + [mark.x for mark in chart.marks], margin=0.01)
    y_range = _padded([y for _, y in finite], margin=_MARGIN)
    if chart.from_zero:
        y_range = 0.0, y_range[1]
    scaled = [[_scaled(point, x_range, y_range) for point in points] for points in lines]
    data = {
        "x": x_range,
        "y": y_range,
        "lines": [
            {"name": line.name, "points": [_plain(each) for each in points]}
            for line, points in zip(chart.lines, lines, strict=True)
        ],
    }
    return Drawing(
        chart=chart,
        paths=tuple(map(_path, scaled)),
        dots=tuple(
            tuple(map(_rounded, points)) if chart.has_dots and not line.is_wide else ()
            for line, points in zip(chart.lines, scaled, strict=True)
        ),
        marks=tuple(
            (mark, _rounded(_scaled((mark.x, 0), x_range, y_range))[0]) for mark in chart.marks
        ),
        data=script_json(data),
    )


def thinned(points: Sequence[Point], *, max_points: int) -> list[Point]:
    """At most so many points: of each part of the line the lowest and the highest are kept."""
    if len(points) <= max_points:
        return list(points)
    num_parts = max(1, max_points // 2)
    kept: list[Point] = []
    for part in range(num_parts):
        first = part * len(points) // num_parts
        last = (part + 1) * len(points) // num_parts
        some = points[first:last]
        extremes = {min(some, key=_height), max(some, key=_height)}
        kept += sorted(extremes)
    return kept


def script_json(value: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _height(point: Point) -> float:
    return point[1] if math.isfinite(point[1]) else -math.inf


def _padded(values: Iterable[float], *, margin: float) -> tuple[float, float]:
    known = list(values)
    low, high = min(known), max(known)
    room = (high - low) * margin or abs(high) * margin or 1.0
    return low - room, high + room


def _scaled(point: Point, x_range: Point, y_range: Point) -> Point:
    x, y = point
    across = (x - x_range[0]) / (x_range[1] - x_range[0]) * UNITS
    down = (y_range[1] - y) / (y_range[1] - y_range[0]) * UNITS if math.isfinite(y) else math.nan
    return across, down


def _path(points: Sequence[Point]) -> str:
    return "".join(_segments(points))


def _segments(points: Sequence[Point]) -> Iterator[str]:
    begins = True
    for x, y in points:
        if math.isnan(y):
            begins = True
            continue
        yield f"{'M' if begins else 'L'}{x:.2f} {y:.2f}"
        begins = False


def _rounded(point: Point) -> Point:
    return round(point[0], 2), round(point[1], 2) if math.isfinite(point[1]) else 0.0


def _plain(point: Point) -> list[float | None]:
    x, y = point
    return [x, float(f"{y:.7g}") if math.isfinite(y) else None]
