"""The count of `enumerate` is found, read and set. Needs no pytest: other interpreters run it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from resumekit.errors import InvalidStateError
from resumekit.live.counts_and_operands import EnumerateCounts, Enumerations, find_asked
from resumekit.state import check_schema

NUM_ITEMS = 9
SAVED_AT = 5


class KilledError(BaseException):
    """Ends a run at the fetch that saved its counts."""


class Items:
    """Numbers whose position is restored at the first fetch, like that of a Checkpointer.

    Args:
        kill_at: the item whose fetch saves the counts and ends the run.
        saved: the counts that the first fetch sets.
        position: the first item.
        make: makes an item of its number.
    """

    def __init__(self, kill_at=None, saved=None, position=0, make: Callable[[int], Any] = int):
        self.kill_at, self.saved, self.position = kill_at, saved, position
        self.initial = self.num_used = position
        self.counts: object = None
        self.num_found = 0
        self.outermost: Any = sys._getframe(1)
        self.make = make

    def __iter__(self):
        return self

    def __next__(self):
        self.num_used = self.position
        if self.position == self.kill_at:
            self.counts = self.counters().as_plain()
            raise KilledError
        if self.saved is not None:
            assert self.counters().set(self.saved)
            self.saved = None
        if self.position == NUM_ITEMS:
            raise StopIteration
        self.num_found = max(self.num_found, len(self.counters().found))
        self.position += 1
        return self.make(self.position)

    def counters(self):
        return Enumerations.around(find_asked(Items, sys._getframe(1), self.outermost))


def numbers_of(loop, items):
    """What a loop gives, until it is killed."""
    given = []
    with contextlib.suppress(KilledError):
        given.extend(loop(items))
    return given


# ---------------------------------------------------------------- what is around a fetch


def plain(items):
    for number, item in enumerate(items):
        pair = number, item
        yield pair


def from_one(items):
    yield from enumerate(items, 1)


def at_the_position(items):
    yield from enumerate(items, start=items.initial)


def with_next(items):
    pairs = enumerate(items)
    while (pair := next(pairs, None)) is not None:
        yield pair


def every_second(items):
    for item in items:
        if item % 2:
            yield item


def of_a_generator(items):
    yield from enumerate(every_second(items))


def through_two_generators(items):
    def delegating():
        yield from every_second(items)

    yield from enumerate(delegating())


def counted_inside_and_outside(items):
    def inner():
        yield from enumerate(items, 100)

    for number, pair in enumerate(inner()):
        yield (number, *pair)


class Ahead:
    """An iterator of the script's."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)


def of_an_object(items):
    yield from enumerate(Ahead(items))


def of_a_map(items):
    yield from enumerate(map(abs, filter(None, items)))


def of_a_zip(items):
    yield from enumerate(zip(items, itertools.repeat(0)))


def inside_a_zip(items):
    yield from zip(enumerate(items), itertools.repeat(0))


FORMS = (
    *(plain, from_one, at_the_position, with_next, of_a_generator, through_two_generators),
    *(counted_inside_and_outside, of_an_object, of_a_map, of_a_zip, inside_a_zip),
)


def test_each_form_continues_its_count():
    for form in FORMS:
        whole, first = Items(), Items(kill_at=SAVED_AT)
        expected, done = numbers_of(form, whole), numbers_of(form, first)
        assert first.counts is not None, form.__name__
        rest = numbers_of(form, Items(saved=first.counts, position=SAVED_AT))
        assert done + rest == expected, form.__name__


def test_without_the_saved_count_each_form_differs():
    for form in FORMS:
        expected = numbers_of(form, Items())
        rest = numbers_of(form, Items(position=SAVED_AT))
        is_absolute = form is at_the_position
        assert (expected[len(expected) - len(rest) :] == rest) == is_absolute, form.__name__


def test_a_count_is_moved_with_the_position():
    saved = {"counts": [5], "used": 5}
    assert numbers_of(plain, Items(saved=saved, position=7)) == [(7, 8), (8, 9)]


def test_an_enumerate_that_does_not_ask_is_not_found():
    items = Items()
    others = [enumerate(Items()), enumerate([1]), enumerate(every_second(items))]
    next(others[1])
    assert list(items) == [*range(1, NUM_ITEMS + 1)]
    assert items.num_found == 0
    # The position of an outer function's enumerate is not that of a loop inside.
    for _ in enumerate([1]):
        items = Items()
        assert [*enumerate(items)]
        assert items.num_found == 1


def test_of_two_over_one_iterator_none_is_found():
    items = Items()
    first, second = enumerate(items), enumerate(items)
    assert next(first) == (0, 1)
    assert next(second) == (0, 2)
    assert items.num_found == 0
    del second
    assert next(first) == (1, 3)
    assert items.num_found == 1


def test_frames_further_out_do_not_count():
    def train():
        items = Items()  # made by the outermost function that counts
        return [*enumerate(items)], items.num_found

    def runs():
        yield train()

    for number, (given, num_found) in enumerate(runs()):
        assert (number, len(given), num_found) == (0, NUM_ITEMS, 1)


# ---------------------------------------------------------------- the memory


def test_the_count_is_behind_the_head_of_the_object():
    """Pins Objects/enumobject.c: `PyObject_HEAD; Py_ssize_t en_index; PyObject *en_sit`."""
    source = iter("abc")
    counter = enumerate(source, 1234567)
    head = object.__basicsize__
    word = ctypes.sizeof(ctypes.c_ssize_t)
    assert ctypes.c_ssize_t.from_address(id(counter) + head).value == 1234567
    assert ctypes.c_ssize_t.from_address(id(counter) + head + word).value == id(source)
    next(counter)
    assert ctypes.c_ssize_t.from_address(id(counter) + head).value == 1234568


def counts_of(start, saved):
    """What `set` returns, and the count of the next item."""
    counter = enumerate("ab", start)
    counters = Enumerations([counter], 0)
    is_set = counters.set({"counts": [saved], "used": 0})
    return is_set, next(counter)[0], counters.as_plain()


def test_a_count_is_read_after_it_was_set():
    assert counts_of(0, 7) == (True, 7, {"counts": [8], "used": 0})
    assert counts_of(7, 0) == (True, 0, {"counts": [1], "used": 0})
    large = sys.maxsize - 1
    assert counts_of(3, large) == (True, large, {"counts": [sys.maxsize], "used": 0})


def test_a_count_that_cannot_be_set_stays():
    large = sys.maxsize + 1
    assert counts_of(0, large) == (False, 0, {"counts": [1], "used": 0})
    assert counts_of(large, 5) == (False, large, None)  # en_longindex has it
    assert counts_of(2, -1) == (False, 2, {"counts": [3], "used": 0})
    assert counts_of(-3, 5)[:2] == (True, 5)
    assert Enumerations([enumerate("a", -3)], 0).as_plain() is None


def test_without_a_saved_count_only_that_at_the_position_is_right():
    for start, is_right in ((0, False), (4, False), (5, True), (6, True)):
        assert Enumerations([enumerate("a", start)], 5).set(None) == is_right
    assert Enumerations([], 5).set(None)
    assert Enumerations([], 5).set({"counts": [3], "used": 5})  # the script has none any more
    assert not Enumerations([enumerate("a")], 5).set({"counts": [3, 4], "used": 5})


def test_damaged_counts_are_refused():
    check_schema("a", EnumerateCounts, {"counts": [0, sys.maxsize], "used": 3})
    good = {"counts": [1], "used": 1}
    bad = [{**good, "counts": each} for each in ([-1], [True], ["1"], [1.0], [None], 1, [2**63])]
    bad += [{**good, "used": each} for each in (-1, True, "1", None)]
    for each in (*bad, {}, [], 3, {"counts": [1]}, {**good, "more": 1}):
        try:
            check_schema("a", EnumerateCounts, each)
        except InvalidStateError:
            continue
        raise AssertionError(each)


# ---------------------------------------------------------------- nothing is kept


class Item:
    """Can be referred to weakly."""

    def __init__(self, number):
        self.number = number


def test_nothing_outlives_a_loop_that_was_left():
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        closed, alive = [], []

        def passing(items):
            try:
                yield from items
            finally:
                closed.append(True)

        def left():
            items = Items(make=Item)
            items.outermost = None  # the frame would keep the loop
            alive.append(weakref.ref(items))
            for number, item in enumerate(passing(items)):
                alive.append(weakref.ref(item))
                if number == 2:
                    assert items.num_found == 1
                    break

        left()
        assert closed == [True]
        assert [each() for each in alive] == [None] * 4
    finally:
        if was_enabled:
            gc.enable()
