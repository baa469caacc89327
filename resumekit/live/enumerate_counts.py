"""The counts of the ``enumerate`` objects that ask for an item: found, read and set.

No variable has the count of ``for i, batch in enumerate(batches)``: the object has it in C.
``enumerate.__next__`` asks for the item first and reads its count after that, so a count that is
set inside the fetch is the number of the item that is being fetched.

Source: Objects/enumobject.c of CPython 3.10 to 3.13.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice
from types import FrameType, GeneratorType
from typing import Any, TypedDict

from resumekit.errors import StateMismatchError
from resumekit.live.frames import read_variables

_DELEGATING = (enumerate, filter, map, zip)  # their __reduce__ gives what they ask for items


class EnumerateCounts(TypedDict):
    """The counts around a fetch, as a checkpoint has them.

    Args:
        counts: the number of the item that is being fetched, by the innermost `enumerate` first.
        used: the items of the loop that were used before.
    """

    counts: list[int]
    used: int


@dataclass(frozen=True)
class Enumerations:
    """The `enumerate` objects around a fetch. Drop it when the fetch ends.

    One that is kept would keep the last item, and the generators that it asks.

    Args:
        found: the objects, the innermost first.
        used: the items of the loop that were used before: its `num_used`.
    """

    found: Sequence[enumerate[Any]]
    used: int

    @classmethod
    def around(cls, asked: Sequence[Any]) -> Enumerations:
        """Returns those around a fetch; looks at all objects, 0.1 s for a million of them.

        Args:
            asked: see `find_asked`; the first has the attribute `num_used`.
        """
        found: dict[int, list[enumerate[Any]]] = {}
        for each in gc.get_objects() if asked else ():
            if type(each) is enumerate and (number := _index(each, asked)) is not None:
                found.setdefault(number, []).append(each)
        # Of several over one iterator nothing says which one asks it.
        known = [found[number][0] for number in sorted(found) if len(found[number]) == 1]
        return cls(known, asked[0].num_used if asked else 0)

    def as_plain(self) -> EnumerateCounts | None:
        """Returns the counts; None where there are none, or one that cannot be set again."""
        counts = [*map(_read, self.found)]
        is_known = bool(counts) and all(map(_is_count, counts))
        return {"counts": counts, "used": self.used} if is_known else None

    def set(self, saved: EnumerateCounts | None) -> bool:
        """Sets the counts of a checkpoint; returns False where one of them is not right then.

        Args:
            saved: where it is None, those are right that the script begins at the position.
        """
        if saved is None or not self.found:
            return all(_read(each) >= self.used for each in self.found)
        moved = self.used - saved["used"]  # not 0 where batches have another size now
        counts = [each + moved for each in saved["counts"]]
        return len(counts) == len(self.found) and all(map(_set, self.found, counts))


def check_counts(path: str, saved: Any) -> None:
    """Raises StateMismatchError unless this is what `Enumerations.as_plain` returns."""
    if saved is None:
        return
    is_right = isinstance(saved, dict) and saved.keys() == {"counts", "used"}
    is_right = is_right and isinstance(saved["counts"], list)
    if not is_right or not all(map(_is_count, (*saved["counts"], saved["used"]))):
        raise StateMismatchError(path, found=f"damaged: {saved!r:.60}", expected="counts of items")


def find_asked(loop: type, start: FrameType, outermost: FrameType) -> list[Any]:
    """Returns what is being asked for an item: a loop, and what asks it, the innermost first.

    Iterators whose `__next__` is a running function, and frames of running generators. Empty where
    no loop is being asked. Drop it when the fetch ends.

    Args:
        loop: the class of loops.
        start: a frame inside the fetch.
        outermost: the last frame that counts.
    """
    return [*dropwhile(lambda each: not isinstance(each, loop), _iter_asked(start, outermost))]


def _iter_asked(start: FrameType, outermost: FrameType) -> Iterator[Any]:
    frame: FrameType | None = start
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            yield frame
        elif frame.f_code.co_name == "__next__":
            yield from islice(read_variables(frame).values(), 1)  # self
        frame = None if frame is outermost else frame.f_back


def is_counter(value: object, asked: Sequence[Any]) -> bool:
    """Whether a value is an `enumerate` object that asks for an item.

    Args:
        value: any value.
        asked: see `find_asked`.
    """
    return type(value) is enumerate and _index(value, asked) is not None


def _index(iterator: Any, asked: Sequence[Any]) -> int | None:
    """The index of what an iterator asks for its items; None where that is not being asked."""
    if type(iterator) in _DELEGATING:
        found = (_index(each, asked) for each in iterator.__reduce__()[1])
        return min((each for each in found if each is not None), default=None)
    running = iterator.gi_frame if isinstance(iterator, GeneratorType) else iterator
    return next((n for n, each in enumerate(asked) if each is running is not None), None)


def _read(counter: enumerate[Any]) -> int:
    return int(counter.__reduce__()[1][1])


def _set(counter: enumerate[Any], count: int) -> bool:
    if sys.implementation.name != "cpython" or not _is_count(count):
        return False
    # Behind the head that all objects have is `Py_ssize_t en_index`.
    memory = ctypes.c_ssize_t.from_address(id(counter) + object.__basicsize__)
    if memory.value != _read(counter):
        return False  # another layout, or a count above sys.maxsize, which has another member
    memory.value = count
    return _read(counter) == count


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= sys.maxsize
