"""Values that no variable of the running functions has: counts of `enumerate`, operands of calls.

No variable has the count of ``for i, batch in enumerate(batches)``: the object has it in C.
``enumerate.__next__`` asks for the item first and reads its count after that, so a count that is
set inside the fetch is the number of the item that is being fetched.

All else that lies on the stack of a function below the fetch is reported: no resume can set it.

Source: Objects/enumobject.c of CPython 3.10 to 3.13.
"""

from __future__ import annotations

import ctypes
import dis
import gc
import inspect
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice
from types import CodeType, FrameType, GeneratorType
from typing import Any, TypedDict

from resumekit.live.bytecode import operands
from resumekit.live.frames import LiveFrame, read_variables, write_variables
from resumekit.live.value_stack import Operand
from resumekit.state import CaptureLine, Count, Fidelity

_DELEGATING = (enumerate, filter, map, zip)  # their __reduce__ gives what they ask for items


class EnumerateCounts(TypedDict):
    """The counts around a fetch, as a checkpoint has them.

    Args:
        counts: the number of the item that is being fetched, by the innermost `enumerate` first.
        used: the items of the loop that were used before.
    """

    counts: list[Count]
    used: Count


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


def move_progress_bars(asked: Sequence[Any]) -> None:
    """Sets each bar of tqdm around a fetch to the number of items that were used before.

    Args:
        asked: see `find_asked`; the first has the attribute `num_used`.

    Source: tqdm 4.70 std.py tqdm.__iter__, which keeps its count in variables.
    """
    for frame in asked:
        if isinstance(frame, FrameType) and frame.f_code.co_filename.endswith("tqdm/std.py"):
            bar: Any = read_variables(frame).get("self")
            used = asked[0].num_used
            if getattr(bar, "n", None) == 0 and not bar.disable:
                write_variables(frame, {"n": used, "last_print_n": used})
                bar.initial = bar.n = bar.last_print_n = used
                bar.refresh()


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


# ---------------------------------------------------------------- operands and positions

_COUNTING = frozenset({"enumerate", "zip", "islice"})


def operand_lines(
    frames: Sequence[LiveFrame], owner: Any, *, has_count: bool, given: Container[int]
) -> Iterator[CaptureLine]:
    """A line for each value that lies on a stack below the fetch and is not computed again.

    What was put there inside ``epochs()`` is: the code of an epoch runs again. And a line for each
    function whose variables are not saved.

    Args:
        frames: of the fetch, the innermost first.
        owner: the Checkpointer.
        has_count: the count of the `enumerate` around the fetch is saved.
        given: the ids of the objects that components save: they stay what they are.
    """
    for frame in frames:
        if frame.reason is not None:
            where, reason = f"{frame.site.file}:{frame.line}", frame.reason
            yield CaptureLine(where, Fidelity.LOST, f"variables are not saved: {reason}")
    checked = range_positions(frames, owner)
    for frame, operand in _pending(frames, owner):
        if operand.is_current:
            if (name := _counter_of(operand, frame.bound_variables(), has_count)) is not None:
                yield count_line(frame, name)
        elif operand.kind == "iterator":
            where = _where(frame, operand)
            if where not in checked:
                yield _position_line(where, operand.text, "loop over ckpt.epochs(...) instead")
        elif operand.kind == "value" and operand.names:
            is_variable = len(operand.path) == 1 and not operand.is_call
            value = frame.bound_variables().get(operand.path[0]) if is_variable else None
            if id(value) in given:
                continue
            what = f"{operand.text} was read before the loop and is not in the checkpoint"
            yield _line(frame, what, "read it after the call")


def range_positions(frames: Sequence[LiveFrame], owner: Any) -> dict[str, int]:
    """The position in each ``range`` of a loop that calls ``next`` for its batches, by its line.

    Gradient accumulation has such a loop: each save finds it at its first iteration, as each
    launch does. Others are at another one after the first step.

    Args:
        frames: of the fetch, the innermost first.
        owner: the Checkpointer.
    """
    pending = [*_pending(frames, owner)]
    is_by_loop = any(
        operand.is_current and not frame.code.co_flags & inspect.CO_GENERATOR
        for frame, operand in pending
    )
    found = {
        _where(frame, operand): frame.bound_variables().get(name)
        for frame, operand in ([] if is_by_loop else pending)
        if operand.kind == "iterator" and operand.path == ("range",) and not operand.is_current
        for name in _stored_first(frame.code, operand)
    }
    return {where: position for where, position in found.items() if type(position) is int}


def moved_ranges(former: Mapping[str, Any], now: Mapping[str, int]) -> Iterator[CaptureLine]:
    """A line for each ``range`` whose position differs between two fetches of a loop.

    Args:
        former: `range_positions` at one of them.
        now: at the other one.
    """
    for where, position in now.items():
        if former.get(where, position) != position:
            yield _position_line(where, "range(...)", "count in a variable: while i < n")


def _pending(frames: Sequence[LiveFrame], owner: Any) -> Iterator[tuple[LiveFrame, Operand]]:
    """What lies on the stacks and is not computed again by a resume, the outermost first."""
    is_recomputed = False
    for frame in reversed(frames):
        if frame.reason is not None:
            continue
        variables = frame.bound_variables()
        for operand in operands(frame.code, frame.lasti):
            if operand.kind == "iterator" and not operand.is_current:
                if _is_epochs(operand, variables, owner):
                    is_recomputed = True
                elif not (is_recomputed or _is_around_run(frame, operand, variables, owner)):
                    yield frame, operand
            elif operand.is_current or not is_recomputed:
                yield frame, operand


def has_operands(frames: Sequence[LiveFrame]) -> bool:
    """Whether a value lies on a stack that was computed from more than a variable's own value."""
    known = (each for each in frames if each.reason is None)
    found = (operand for each in known for operand in operands(each.code, each.lasti))
    return any(each.kind == "value" and each.names and len(each.path) != 1 for each in found)


def _is_epochs(operand: Operand, variables: dict[str, Any], owner: Any) -> bool:
    """Whether it iterates ``epochs()``, perhaps through ``enumerate`` and a progress bar."""
    paths = [each for each in (operand.path, *operand.inner_paths) if each != ("enumerate",)][:2]
    if any(path[-1:] == ("epochs",) and operand.is_call for path in paths):
        return True
    return any(_is_of(variables.get(path[0]), owner) for path in paths if len(path) == 1)


def _is_of(value: Any, owner: Any) -> bool:
    """Whether it is an iterator of the Checkpointer's loops, or a bar of tqdm over one."""
    inner = getattr(value, "__dict__", {}).get("iterable", value)
    return getattr(type(inner), "__module__", "") == "resumekit.run.loops" and owner is not None


def _is_around_run(
    frame: LiveFrame, operand: Operand, variables: dict[str, Any], owner: Any
) -> bool:
    """Whether the loop makes the Checkpointer: each iteration is a run of its own."""
    names = {name for name, value in variables.items() if value is owner}
    return any(each in names for each in _stored_in_loop(frame.code, operand))


def _stored_first(code: CodeType, operand: Operand) -> list[str]:
    """The variable that a loop stores its item in, where nothing else stores it."""
    stored = [*_stored_in_loop(code, operand)][:1]
    instructions = [each.argval for each in dis.get_instructions(code) if "STORE_" in each.opname]
    every = [n for each in instructions for n in (each if isinstance(each, tuple) else (each,))]
    return [name for name in stored if every.count(name) == 1]


def _stored_in_loop(code: CodeType, operand: Operand) -> Iterator[str]:
    start = min(operand.origins, default=0)
    end = start
    for each in dis.get_instructions(code):
        if each.offset > start and end == start and each.opname == "FOR_ITER":
            end = each.argval
        if start < each.offset < end and each.opname.startswith("STORE_"):
            yield from each.argval if isinstance(each.argval, tuple) else (str(each.argval),)


def _counter_of(operand: Operand, variables: dict[str, Any], has_count: bool) -> str | None:
    """The function whose count is lost, of what a loop iterates over, perhaps in a progress bar."""
    paths = (operand.path, *operand.inner_paths) if operand.is_call else ()
    value = None if operand.is_call or not operand.path else variables.get(operand.path[0])
    inner = getattr(value, "__dict__", {}).get("iterable", value)
    names = (*(path[-1] for path in paths if path), type(inner).__name__)
    lost = _COUNTING - {"enumerate"} if has_count else _COUNTING
    return next((name for name in names if name in lost), None)


def count_line(frame: LiveFrame, name: str) -> CaptureLine:
    """The line on a count that starts again after a resume.

    Args:
        frame: that asks for the batch.
        name: of the function that counts.
    """
    is_enumerate = name == "enumerate"
    start = "(batches, start=batches.initial)" if is_enumerate else "(batches): its count continues"
    what = f"the count of {name} starts again after a resume"
    return _line(frame, what, f"write enumerate{start}")


def _where(frame: LiveFrame, operand: Operand) -> str:
    """File and line of the loop whose iterator it is."""
    origin = min(operand.origins, default=0)
    lines = [line for offset, line in dis.findlinestarts(frame.code) if offset <= origin and line]
    return f"{frame.site.file}:{lines[-1] if lines else frame.line}"


def _position_line(where: str, text: str, remedy: str) -> CaptureLine:
    reason = f"the position in {text} is not in the checkpoint; {remedy}"
    return CaptureLine(where, Fidelity.LOST, reason, is_at_source=True)


def _line(frame: LiveFrame, what: str, remedy: str) -> CaptureLine:
    where = f"{frame.site.file}:{frame.line}"
    return CaptureLine(where, Fidelity.LOST, f"{what}; {remedy}", is_at_source=True)
