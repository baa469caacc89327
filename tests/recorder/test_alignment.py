"""Where a launch continues, seen from its weights."""

from __future__ import annotations

from resumekit.recorder import Origin, Position, align

KNOWN = [
    Position(1, "a", 0, ("0x1p-1",)),
    Position(2, "a", 1, ("0x1p-2",)),  # a warm-up from a learning rate of zero
    Position(3, "a", 2, ("0x1p-2",)),
    Position(4, "b", 3, ("0x1p-3",)),
    Position(4, "b", 3, ("0x1p-3",)),  # trained again by an earlier launch
]


def test_the_weights_decide() -> None:
    assert align(Position(0, "b", 0, ("other",)), KNOWN) == Origin(4, "weights")


def test_the_counter_of_the_optimizer_decides_between_equal_weights() -> None:
    assert align(Position(0, "a", 1, ("other",)), KNOWN) == Origin(2, "weights")


def test_the_learning_rate_decides_where_the_counter_was_lost() -> None:
    assert align(Position(0, "a", 9, ("0x1p-1",)), KNOWN) == Origin(1, "weights")


def test_what_nothing_decides_is_reported_as_ambiguous() -> None:
    assert align(Position(0, "a", 9, ("0x1p-2",)), KNOWN) == Origin(3, "ambiguous")


def test_weights_of_no_step_are_aligned_by_the_counter() -> None:
    assert align(Position(0, "x", 2), KNOWN) == Origin(3, "counter")


def test_weights_and_counter_of_no_step_are_a_restart() -> None:
    assert align(Position(0, "x", 0), KNOWN) == Origin(1, "nothing")
    assert align(Position(0, "x", 7), KNOWN) == Origin(1, "nothing")
