"""Charts in drawing units."""

from __future__ import annotations

import json
import math

import pytest

from resumekit.html_report.charts import Chart, Line, Mark, drawn, script_json, thinned


def chart(*lines: Line, marks: tuple[Mark, ...] = ()) -> Chart:
    return Chart("title", "summary", "step", "loss", lines, marks)


def test_all_points_lie_in_the_drawing_and_the_data_are_the_values() -> None:
    points = tuple((float(step), 2.0 / step) for step in range(1, 50))
    drawing = drawn(chart(Line("a", points), marks=(Mark(60, "kill", "stopped"),)))
    assert drawing is not None
    numbers = [float(word) for word in drawing.paths[0].replace("M", " ").replace("L", " ").split()]
    assert min(numbers) >= 0
    assert max(numbers) <= 1000
    assert drawing.marks[0][1] <= 1000
    data = json.loads(drawing.data)
    assert [tuple(point) for point in data["lines"][0]["points"]] == [
        (x, pytest.approx(y)) for x, y in points
    ]


def test_a_value_that_is_not_finite_interrupts_the_line() -> None:
    points = ((1, 1.0), (2, math.nan), (3, 2.0), (4, math.inf), (5, 1.0))
    drawing = drawn(chart(Line("a", points)))
    assert drawing is not None
    assert drawing.paths[0].count("M") == 3
    assert [y for _, y in json.loads(drawing.data)["lines"][0]["points"]] == [1, None, 2, None, 1]


def test_without_a_finite_point_nothing_is_drawn() -> None:
    assert drawn(chart()) is None
    assert drawn(chart(Line("a", ((1, math.nan),)))) is None


def test_a_line_of_one_value_has_a_range() -> None:
    for value in (0.0, 3.0, -1e-9):
        drawing = drawn(chart(Line("a", ((5, value),))))
        assert drawing is not None
        low, high = json.loads(drawing.data)["y"]
        assert low < value < high


def test_a_thinned_line_keeps_each_extreme() -> None:
    points = [(float(step), math.sin(step / 50)) for step in range(100_000)]
    points[70_001] = (70_001.0, 9.0)
    points[30_001] = (30_001.0, -9.0)
    kept = thinned(points, max_points=1000)
    assert len(kept) <= 1000
    assert {9.0, -9.0} <= {y for _, y in kept}
    assert kept == sorted(kept)
    assert thinned(points[:10], max_points=1000) == points[:10]


def test_no_text_ends_the_script_element() -> None:
    assert "<" not in script_json({"name": "</script><b>"})
    assert json.loads(script_json({"name": "</script><b>"})) == {"name": "</script><b>"}
