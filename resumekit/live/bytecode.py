"""What a running function still needs, read from its bytecode.

The variables that the rest of a run needs from a frame are those that are read after the
instruction that it executes before they are written: a backward data flow over its instructions.
What no variable has lies on the frame's value stack: the operands of a call under way.

Works on CPython 3.10 to 3.13.
"""

from __future__ import annotations

import dis
import inspect
from dataclasses import replace
from functools import lru_cache
from types import CodeType

from resumekit.live.value_stack import (
    CALLS,
    NUM_CACHED,
    Operand,
    Simulation,
    Stack,
    UnsupportedBytecodeError,
    find_executed,
    iter_nested,
    list_accesses,
    read_instructions,
    simulate,
    split_callee,
    stored_values,
)

_GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_READERS = frozenset({"locals", "eval", "exec"})  # they read any variable
_OF_MODULE = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
_FETCHES = frozenset({"FOR_ITER", "SEND", "YIELD_FROM"})

_CLOCKS = frozenset(
    {"perf_counter", "monotonic", "time", "process_time", "thread_time", "strftime"}
)


def live_names(code: CodeType, lasti: int) -> frozenset[str]:
    """Returns the variables that are read after an instruction before they are written.

    Variables that a nested function shares count always. Names like `__name__` never do.

    Args:
        code: of the frame.
        lasti: of the frame; the instruction that it executes now.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    simulation, live, offset = simulate(code), _live_sets(code), find_executed(code, lasti)
    _check_reached(simulation, code, offset)
    reached = simulation.successors[offset] + simulation.handlers[offset]
    names = frozenset(code.co_cellvars + code.co_freevars).union(*(live[each] for each in reached))
    return frozenset(
        name
        for name in names
        if name.isidentifier() and not (name.startswith("__") and name.endswith("__"))
    )


@lru_cache(maxsize=NUM_CACHED)
def stored_names(code: CodeType, lasti: int) -> frozenset[str]:
    """Returns the variables that the function may still write after an instruction.

    Args:
        code: of the frame.
        lasti: of the frame; the instruction that it executes now.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    simulation, offset = simulate(code), find_executed(code, lasti)
    _check_reached(simulation, code, offset)
    reached = _reached_after(simulation, offset)
    accesses = (
        each for offset in reached for each in list_accesses(simulation.instructions[offset])
    )
    return frozenset(name for access, name in accesses if access == "store")


@lru_cache(maxsize=NUM_CACHED)
def _live_sets(code: CodeType) -> dict[int, frozenset[str]]:
    """The names that are live before each instruction, hidden ones included."""
    simulation = simulate(code)
    instructions = simulation.instructions
    implicit = {offset: _implicit_reads(code, instructions[offset]) for offset in simulation.states}
    live = dict(implicit)
    order = sorted(live, reverse=True)
    is_changed = True
    while is_changed:
        is_changed = False
        for offset in order:
            after = frozenset().union(*(live[each] for each in simulation.successors[offset]))
            before = _live_before(simulation, offset, after, code.co_name == "<module>")
            before = before.union(*(live[each] for each in simulation.handlers[offset]))
            before |= implicit[offset]
            if before != live[offset]:
                live[offset], is_changed = before, True
    return live


def _live_before(
    simulation: Simulation, offset: int, after: frozenset[str], is_module: bool
) -> frozenset[str]:
    """The names that are live before an instruction, from those that are live after it.

    A comprehension that the compiler has put into a function (Python 3.12) clears a variable and
    restores it at its end. The value lives on the stack meanwhile, under a hidden name here.
    """
    instruction = simulation.instructions[offset]
    accesses = list_accesses(instruction)
    if not accesses or (instruction.opname in _OF_MODULE and not is_module):
        return after
    live = set(after)
    stored = stored_values(simulation, offset)
    for access, name in reversed(accesses):
        if access in ("load", "delete"):
            live.add(name)
        elif access == "store":
            value = stored.pop()[1]
            if value.kind == "cleared" and name in live:
                live.add(f"{name}@{min(value.origins)}")
            live.discard(name)
        else:
            hidden = f"{name}@{offset}"
            live = live - {hidden} | {name} if hidden in live else live - {name}
    return frozenset(live)


def _implicit_reads(code: CodeType, instruction: dis.Instruction) -> frozenset[str]:
    """The variables that an instruction reads through a function that it makes or loads."""
    is_module, loaded = code.co_name == "<module>", frozenset[str]()
    if is_module and isinstance(instruction.argval, CodeType):
        loaded = loaded_globals(instruction.argval)  # a lambda or a comprehension may run here
    elif instruction.opname in _GLOBAL_LOADS:
        loaded = frozenset({instruction.argval})
    if loaded & _READERS or (is_module and "globals" in loaded):
        return frozenset(code.co_names + code.co_varnames)
    if is_module:
        return loaded
    # Without arguments, super() takes the first one of the function from the frame.
    return frozenset(code.co_varnames[:1] if "super" in loaded else ())


def _check_reached(simulation: Simulation, code: CodeType, offset: int) -> None:
    if offset not in simulation.states:
        found = f"instruction {offset} of {code.co_name} is on no path"
        raise UnsupportedBytecodeError(found)


def operands(code: CodeType, lasti: int) -> tuple[Operand, ...]:
    """Returns what lies on a frame's value stack below the call under way, the bottom first.

    The callee of that call and its arguments are left out. An iterator whose next item is being
    fetched is the last one, with `is_current`.

    Args:
        code: of the frame.
        lasti: of the frame; the instruction that it executes now.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    offset, called = find_executed(code, lasti), _called_origins(code)
    found = [
        _classify(operand, called) for operand in _below(code, offset) if operand.kind != "null"
    ]
    if read_instructions(code)[offset].opname in _FETCHES:
        iterator = simulate(code).popped(offset)[0]
        found.append(replace(iterator, kind="iterator", is_current=True))
    return tuple(found)


def _classify(operand: Operand, called: frozenset[int]) -> Operand:
    if operand.kind == "cleared":
        return replace(operand, kind="value")
    is_callee = operand.kind == "value" and not operand.origins.isdisjoint(called)
    if is_callee and operand.path and not operand.is_call:
        return replace(operand, kind="method")
    return operand


def _below(code: CodeType, offset: int) -> Stack:
    simulation = simulate(code)
    _check_reached(simulation, code, offset)
    stack = simulation.states[offset].stack
    return stack[: len(stack) - len(simulation.popped(offset))]


@lru_cache(maxsize=NUM_CACHED)
def _called_origins(code: CodeType) -> frozenset[int]:
    """The instructions that push what a later instruction calls."""
    simulation = simulate(code)
    return frozenset().union(
        *(
            split_callee(simulation.popped(offset))[0].origins
            for offset in simulation.states
            if simulation.instructions[offset].opname in CALLS
        )
    )


def is_in_comprehension(code: CodeType, lasti: int) -> bool:
    """Whether a comprehension runs that the compiler has put into the function (Python 3.12)."""
    return any(operand.kind == "cleared" for operand in _below(code, find_executed(code, lasti)))


@lru_cache(maxsize=NUM_CACHED)
def cleared_names(code: CodeType) -> frozenset[str]:
    """Returns the variables of the function that comprehensions inside it hide (Python 3.12)."""
    return frozenset(
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_FAST_AND_CLEAR"
    )


def loaded_globals(code: CodeType) -> frozenset[str]:
    """Returns the names that a code and all code in it load as globals.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    return _arguments(code, _GLOBAL_LOADS)


def _arguments(code: CodeType, opnames: frozenset[str]) -> frozenset[str]:
    return frozenset(
        str(instruction.argval)
        for each in (code, *iter_nested(code))
        for instruction in read_instructions(each).values()
        if instruction.opname in opnames
    )


@lru_cache(maxsize=NUM_CACHED)
def clock_names(code: CodeType) -> frozenset[str]:
    """Returns the variables that have nothing but readings of a clock, copies or text of such.

    A parameter, or a variable that other code may store, is none.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    simulation = simulate(code)
    stored: dict[str, list[Operand]] = {}
    for offset in simulation.states:
        for name, value in stored_values(simulation, offset):
            stored.setdefault(name, []).append(value)
    parameters = inspect.getargs(code)
    names = {*stored} - {*parameters.args, parameters.varargs, parameters.varkw}
    stores = frozenset({"STORE_DEREF", "STORE_GLOBAL"})
    names -= {*code.co_freevars}.union(*(_arguments(each, stores) for each in iter_nested(code)))
    while others := {
        name
        for name in names
        if not all(_is_of_clock(simulation, value, names) for value in stored[name])
    }:
        names -= others
    return frozenset(names)


def _is_of_clock(simulation: Simulation, value: Operand, names: set[str]) -> bool:
    """Whether it is a reading, a variable that has one, or what a method of a reading returns.

    A method may have only constants as arguments: what training computes must not flow in. Other
    expressions are none: `int(time.time())` may be a seed, which decides what training does.
    """
    if _is_clock(value):
        return True
    if not value.is_call:
        return len(value.path) == 1 and value.path[0] in names
    owners = [owner for origin in value.origins for owner in _owners(simulation, origin)]
    return bool(owners) and all(
        value.names == owner.names and _is_of_clock(simulation, owner, names) for owner in owners
    )


def _owners(simulation: Simulation, called: int) -> Stack:
    """The object whose method a call calls; empty where no attribute is called."""
    callee = split_callee(simulation.popped(called))[0]
    return tuple(
        simulation.popped(origin)[-1]
        for origin in callee.origins
        if simulation.instructions[origin].opname in ("LOAD_ATTR", "LOAD_METHOD")
    )


def _is_clock(value: Operand) -> bool:
    *owner, name = value.path or ("",)
    if owner == ["time"] or (not owner and name.removesuffix("_ns") in _CLOCKS):
        return value.is_call
    return owner[-1:] == ["datetime"] and name in ("now", "utcnow", "today") and value.is_call


def _reached_after(simulation: Simulation, offset: int) -> set[int]:
    """The instructions that may run after an instruction."""
    reached: set[int] = set()
    waiting = {offset}
    while waiting:
        each = waiting.pop()
        after = {*simulation.successors[each], *simulation.handlers[each]} - reached
        reached |= after
        waiting |= after
    return reached
