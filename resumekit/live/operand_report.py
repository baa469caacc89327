"""Values on the stack of running functions that no variable holds, and that a resume cannot set."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

from resumekit.live.bytecode import operands
from resumekit.live.frames import LiveFrame
from resumekit.live.loop_counts import begins_at_position, reaches_only_logging
from resumekit.live.value_stack import Operand
from resumekit.state import CaptureLine, Fidelity

_COUNTING = frozenset({"enumerate", "zip", "islice"})


def operand_lines(
    frames: Sequence[LiveFrame], owner: Any, *, is_stateless: Callable[[Any], bool]
) -> Iterator[CaptureLine]:
    """A line for each value that lies on a stack below the fetch and is not computed again.

    What was put there inside ``epochs()`` is: the code of an epoch runs again.

    Args:
        frames: of the fetch, the innermost first.
        owner: the Checkpointer.
        is_stateless: whether an object is of a library's class that has no state of the training.
    """
    is_recomputed = False
    for frame in reversed(frames):
        if frame.reason is not None:
            continue
        variables = frame.bound_variables()
        for operand in operands(frame.code, frame.lasti):
            if operand.kind == "iterator":
                if operand.is_current:
                    name = _counter_of(operand, variables)
                    yield from _count_lines(frame, name, is_stateless)
                elif _is_epochs(operand, variables, owner):
                    is_recomputed = True
                elif not (is_recomputed or _is_around_run(frame, operand, variables, owner)):
                    what = f"the position in {operand.text} is not in the checkpoint"
                    yield _line(frame, what, "loop over ckpt.epochs(...) instead")
            elif operand.kind == "value" and operand.names and not is_recomputed:
                what = f"{operand.text} was read before the loop and is not in the checkpoint"
                yield _line(frame, what, "read it after the call")


def has_operands(frames: Sequence[LiveFrame]) -> bool:
    """Whether a value lies on a stack that was computed from more than a variable's own value."""
    known = (each for each in frames if each.reason is None)
    found = (operand for each in known for operand in operands(each.code, each.lasti))
    return any(each.kind == "value" and each.names and len(each.path) != 1 for each in found)


def _is_epochs(operand: Operand, variables: dict[str, Any], owner: Any) -> bool:
    """Whether it iterates ``epochs()`` of the Checkpointer, perhaps through a progress bar."""
    paths = (operand.path, operand.inner_path)
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


def _stored_in_loop(code: CodeType, operand: Operand) -> Iterator[str]:
    start = min(operand.origins, default=0)
    end = start
    for each in dis.get_instructions(code):
        if each.offset > start and end == start and each.opname == "FOR_ITER":
            end = each.argval
        if start < each.offset < end and each.opname.startswith("STORE_"):
            yield from each.argval if isinstance(each.argval, tuple) else (str(each.argval),)


def _counter_of(operand: Operand, variables: dict[str, Any]) -> str:
    """The function that counts what a loop iterates over, perhaps in a progress bar; else empty."""
    paths = (operand.path, operand.inner_path) if operand.is_call else ()
    value = None if operand.is_call or not operand.path else variables.get(operand.path[0])
    inner = getattr(value, "__dict__", {}).get("iterable", value)
    names = (*(path[-1] for path in paths if path), type(inner).__name__)
    return next((name for name in names if name in _COUNTING), "")


def _count_lines(
    frame: LiveFrame, name: str, is_stateless: Callable[[Any], bool]
) -> Iterator[CaptureLine]:
    """A line where the count of the loop itself decides something; an absolute one is right."""
    if name not in _COUNTING:
        return
    is_enumerate = name == "enumerate"
    if is_enumerate and (begins_at_position(frame) or reaches_only_logging(frame, is_stateless)):
        return
    what = f"the count of {name} starts again after a resume and decides something"
    yield _line(frame, what, "write enumerate(batches, start=batches.initial)")


def _line(frame: LiveFrame, what: str, remedy: str) -> CaptureLine:
    where = f"{frame.site.file}:{frame.line}"
    return CaptureLine(where, Fidelity.LOST, f"{what}; {remedy}", is_at_source=True)
