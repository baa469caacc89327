"""Plain values that change in user code, and that nobody saves."""

from __future__ import annotations

from typing import Any

from resumekit.capture import PlainValues


class Holder:
    """An object with attributes of its own."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def test_what_changed_is_named_once() -> None:
    one = Holder(num=0, sums={"a": 1.0}, rows=[], done=False, every=5, model=object())
    values = PlainValues({"a.one": one})
    assert values.changed() == []
    one.num, one.done, one.late = 1, True, "x"
    one.sums["a"] = 2.0
    assert values.changed() == [f"a.one.{n}" for n in ("num", "sums", "done", "late")]
    one.num = 2
    one.rows.extend([0] * 100)
    assert values.changed() == ["a.one.rows"]


def test_containers_in_containers_count_and_those_of_objects_do_not() -> None:
    one = Holder(rows=[(0, {"loss": 1.0})], pair=(1, 2), graph={}, objects=[object()])
    one.graph["self"] = one.graph
    values = PlainValues({"one": one})
    one.rows[0][1]["loss"] = 2.0
    one.pair = (1, 3)
    one.graph["other"] = 1
    one.objects.append(object())
    assert values.changed() == ["one.rows", "one.pair"]
    one.rows = [(step, {"loss": 0.5}) for step in range(100)]
    assert values.changed() == []  # each is named once


def test_what_is_others_or_saved_elsewhere_is_not_looked_at() -> None:
    extras = {"steps": 0}
    one = Holder(num=0, extras=extras)
    values = PlainValues({"one": one}, left_out={"one": {"num"}}, known=[extras])
    one.num = extras["steps"] = 1
    assert values.changed() == []
