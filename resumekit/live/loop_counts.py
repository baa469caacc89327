"""Where the count of a loop over `enumerate` begins, and what it reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resumekit.live.bytecode import GLOBAL_LOADS, nested_arguments, reach
from resumekit.live.call_effects import FunctionScope
from resumekit.live.frames import LiveFrame
from resumekit.live.instructions import TESTS, list_accesses
from resumekit.live.value_stack import Operand, Simulation, simulate, split_callee, stored_values

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


def begins_at_position(frame: LiveFrame) -> bool:
    """Whether the `start` of a loop's `enumerate` is made from `.initial` of what it counts.

    Args:
        frame: at the FOR_ITER of the loop.
    """
    simulation = simulate(frame.code)
    calls = [
        offset
        for each in _sources(simulation, simulation.states[frame.lasti].stack[-1])
        if each.is_call and each.path == ("enumerate",)
        for offset in each.origins
    ]
    return bool(calls) and all(_has_start(simulation, offset) for offset in calls)


def _has_start(simulation: Simulation, call: int) -> bool:
    _, (counted, *others) = split_callee(simulation.popped(call))
    known = [*_sources(simulation, counted)]
    paths = {each.path for each in known if each.path and not each.is_call}
    origins = {offset for each in known if each.is_call for offset in each.origins}
    for argument in others:
        for each in _sources(simulation, argument):
            for offset in each.origins:
                instruction = simulation.instructions.get(offset)
                if instruction is None or instruction.opname not in _ATTRIBUTES:
                    continue
                owner = simulation.popped(offset)[-1]
                same = {o for value in _stored(simulation, owner) for o in value.origins}
                if instruction.argval == "initial" and (owner.path in paths or same & origins):
                    return True
    return False


def _sources(simulation: Simulation, operand: Operand) -> Iterator[Operand]:
    """Yields what a value was computed from, through variables of the function, and itself."""
    waiting, seen = [operand], set[Operand]()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value
        waiting += _stored(simulation, value)
        for offset in value.origins & simulation.states.keys():
            waiting += simulation.popped(offset)


def _stored(simulation: Simulation, operand: Operand) -> list[Operand]:
    """The values that the function stores in the variable that a value was loaded from."""
    if operand.is_call or len(operand.path) != 1:
        return []
    found = (each for offset in simulation.states for each in stored_values(simulation, offset))
    return [value for name, value in found if name == operand.path[0]]


def reaches_only_logging(frame: LiveFrame, is_stateless: Callable[[Any], bool]) -> bool:
    """Whether the count of a loop over `enumerate` is only logged; False when not sure.

    It may be an argument of a call that changes nothing, as one of a logger, and part of a test
    whose branches differ in nothing but such calls.

    Args:
        frame: at the FOR_ITER of the loop, whose items are pairs of a count and another value.
        is_stateless: whether an object is of a library's class that has no state of the training.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    code, loop, simulation = frame.code, frame.lasti, simulate(frame.code)
    bound = frame.bound_variables()
    if not _is_enumerate(simulation.states[loop].stack[-1], bound):
        return False
    unpack = next(offset for offset in simulation.instructions if offset > loop)
    store = next(offset for offset in simulation.instructions if offset > unpack)
    is_unpacked = simulation.instructions[unpack].opname == "UNPACK_SEQUENCE"
    names = [name for name, _ in stored_values(simulation, store)]
    shared = {*code.co_cellvars, *code.co_freevars, *nested_arguments(code, *GLOBAL_LOADS)}
    if not is_unpacked or not names or names[0] in shared:
        return False
    count = names[0]
    stores = [
        offset
        for offset, instruction in simulation.instructions.items()
        if ("store", count) in list_accesses(instruction)
    ]
    reached = reach(simulation, simulation.successors[store], stores)
    unbound = {*code.co_varnames, *code.co_cellvars, *code.co_freevars} - bound.keys()
    body = _body(simulation, loop)
    stored = {name for each in body for name, _ in stored_values(simulation, each)}
    unknown = frozenset(stored | unbound)
    scope = FunctionScope.of_frame(frame.frame, bound, unknown=unknown, is_stateless=is_stateless)
    return all(_only_logs(simulation, offset, count, loop, scope) for offset in reached)


def _body(simulation: Simulation, loop: int) -> set[int]:
    """The instructions of a loop, with the handlers of their exceptions."""
    end = simulation.instructions[loop].argval
    inside = {offset for offset in simulation.states if loop < offset < end}
    handlers = {each for offset in inside for each in simulation.handlers[offset]}
    return inside | reach(simulation, handlers, {loop, *inside})


def _is_enumerate(iterator: Operand, bound: Mapping[str, Any]) -> bool:
    if iterator.is_call:
        return iterator.path == ("enumerate",)
    return len(iterator.path) == 1 and type(bound.get(iterator.path[0])) is enumerate


def _only_logs(
    simulation: Simulation, offset: int, count: str, loop: int, scope: FunctionScope
) -> bool:
    """Whether an instruction does not use the count, or computes or logs something of it."""
    if not any(count in operand.names for operand in simulation.popped(offset)):
        return True
    if simulation.instructions[offset].opname not in TESTS:
        return scope.changes_nothing(offset)
    one, other = (reach(simulation, [each], [loop]) for each in simulation.successors[offset])
    return all(scope.changes_nothing(each) for each in one ^ other)
