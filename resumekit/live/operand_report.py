"""Values on the stack of running functions that no variable holds, and that a resume cannot set."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from resumekit.live.bytecode import operands
from resumekit.live.frames import LiveFrame
from resumekit.live.value_stack import Operand
from resumekit.state import CaptureLine, Fidelity

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
