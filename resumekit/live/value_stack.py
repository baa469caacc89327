"""The values on a function's stack before each of its instructions, by simulation.

The simulation runs forward over all paths, also those of exceptions: by the exception table from
Python 3.11 on, by blocks before. A value stands for what it was computed from.

Source: Objects/exception_handling_notes.txt of CPython.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple

from resumekit.live.instructions import (
    CALLS,
    COMPUTATIONS,
    NUM_CACHED,
    SETUPS,
    SHUFFLES,
    TERMINATORS,
    UPDATES,
    VERSION,
    UnsupportedBytecodeError,
    count_effect,
    list_accesses,
    read_instructions,
)

_TEXT_LENGTH = 60
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})


@dataclass(frozen=True)
class Operand:
    """One value on a frame's value stack.

    Args:
        kind: "iterator", "exit" (of a with statement), "method" (a function or method that a path
            names and a later call calls), "constant", or "value" (any other).
        names: variables and globals that it was computed from.
        text: as in the source, for a message.
        path: of a variable, of an attribute of one, or of what was called to get the value:
            `("ckpt", "epochs")`; empty for any other.
        is_current: an iterator whose next item is being fetched.
        is_call: the value is the result of a call.
        inner_paths: the path of the first argument of that call; if that is the result of a call,
            the path of the first argument of it as well, and so on.
        origins: instructions that pushed it.
    """

    kind: str
    names: frozenset[str] = frozenset()
    text: str = ""
    path: tuple[str, ...] = ()
    is_current: bool = False
    is_call: bool = False
    inner_paths: tuple[tuple[str, ...], ...] = ()
    origins: frozenset[int] = field(default=frozenset(), repr=False)


Stack = tuple[Operand, ...]


class State(NamedTuple):
    """What an instruction finds.

    Args:
        stack: the values, the bottom first. Kinds "null" and "cleared" (the variable that an
            inlined comprehension hides) are of the interpreter.
        blocks: on Python 3.10, the handlers' offsets and the depths that they expect.
    """

    stack: Stack
    blocks: tuple[tuple[int | None, int], ...] = ()


class Simulation(NamedTuple):
    """Each instruction of a code that can run, by its offset.

    Args:
        instructions: all of them.
        states: what each finds.
        successors: the instructions that run next without an exception.
        handlers: those that run next after an exception.
    """

    instructions: dict[int, dis.Instruction]
    states: dict[int, State]
    successors: dict[int, tuple[int, ...]]
    handlers: dict[int, tuple[int, ...]]

    def popped(self, offset: int) -> Stack:
        """The values that an instruction pops."""
        stack = self.states[offset].stack
        return stack[len(stack) - count_effect(self.instructions[offset])[0] :]


_NULL = Operand("null")
_EXCEPTION = Operand("value", text="an exception")


@lru_cache(maxsize=NUM_CACHED)
def simulate(code: CodeType) -> Simulation:
    """Returns the stack before each instruction of a code, and what runs after each.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    instructions = read_instructions(code)
    # Python 3.11 to 3.13 dis.py Bytecode.exception_entries: the parsed table, undocumented.
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    following = dict(pairwise(instructions))
    # A generator of Python 3.10 begins with the value that was sent; later versions push it.
    is_started = VERSION < (3, 11) and code.co_flags & _GENERATORS
    found = Simulation(instructions, {0: State((_NULL,) if is_started else ())}, {}, {})
    waiting = [0]
    while waiting:
        offset = waiting.pop()
        state = found.states[offset]
        covering = [entry for entry in entries if entry.start <= offset < entry.end]
        handled = [*_handler_states(state, covering)]
        continued = [*_next_states(instructions[offset], state, following.get(offset))]
        found.handlers[offset] = tuple(target for target, _ in handled)
        found.successors[offset] = tuple(target for target, _ in continued)
        for target, arriving in reversed(continued + handled):
            known = found.states.get(target, arriving)
            merged = _merge_states(known, arriving)
            if target not in found.states or merged != known:
                found.states[target] = merged
                waiting.append(target)
    return found


def split_callee(popped: Stack) -> tuple[Operand, Stack]:
    """Returns what is called and its arguments, of the values that a call pops."""
    callee, *arguments = (operand for operand in popped if operand.kind != "null")
    return callee, tuple(arguments)


def stored_values(simulation: Simulation, offset: int) -> list[tuple[str, Operand]]:
    """Returns the variables that an instruction stores, in this order, with their values."""
    accesses = list_accesses(simulation.instructions[offset])
    names = [name for access, name in accesses if access == "store"]
    return list(zip(names, reversed(simulation.states[offset].stack), strict=False))


def _next_states(
    instruction: dis.Instruction, state: State, following: int | None
) -> Iterator[tuple[int, State]]:
    """Where the run continues without an exception, and what it finds there."""
    name, blocks = instruction.opname, state.blocks
    if name in SETUPS:
        depth = len(_after(instruction, state.stack)) - (name != "SETUP_FINALLY")
        blocks = (*blocks, (instruction.argval, depth))
    elif name in ("POP_BLOCK", "POP_EXCEPT", "END_ASYNC_FOR"):
        blocks = blocks[:-1]
    elif instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
        yield instruction.argval, State(_after_jump(instruction, state.stack), blocks)
    if name not in TERMINATORS and following is not None:
        yield following, State(_after(instruction, state.stack), blocks)


def _handler_states(state: State, covering: Iterable[Any]) -> Iterator[tuple[int, State]]:
    """The handlers of an exception that an instruction raises, and what they find."""
    for entry in covering:
        if entry.depth > len(state.stack):
            raise UnsupportedBytecodeError("a handler expects more values than the stack has")
        pushed = (_NULL, _EXCEPTION) if entry.lasti else (_EXCEPTION,)
        yield entry.target, State(state.stack[: entry.depth] + pushed)
    for number in reversed(range(len(state.blocks))):
        handler, depth = state.blocks[number]
        if handler is not None:
            # 3.10 ceval.c exception_unwind: the handled exception's triple, then the new one's.
            triples = (_NULL, _NULL, _NULL, _NULL, _EXCEPTION, _NULL)
            blocks = (*state.blocks[:number], (None, depth))
            yield handler, State((*state.stack[:depth], *triples), blocks)
            return


def _merge_states(known: State, other: State) -> State:
    """What holds on both paths to an instruction."""
    if known == other:
        return known
    if len(known.stack) != len(other.stack) or known.blocks != other.blocks:
        raise UnsupportedBytecodeError("the stack has two depths at one instruction")
    return State(tuple(map(_merge, known.stack, other.stack)), known.blocks)


def _merge(known: Operand, other: Operand) -> Operand:
    if known == other:
        return known
    return replace(
        known,
        kind=known.kind if known.kind == other.kind else "value",
        names=known.names | other.names,
        path=known.path if known.path == other.path else (),
        is_call=known.is_call and other.is_call,
        inner_paths=known.inner_paths if known.inner_paths == other.inner_paths else (),
        origins=known.origins | other.origins,
    )


def _after(instruction: dis.Instruction, stack: Stack) -> Stack:
    """The stack after an instruction that does not jump."""
    num_popped, num_pushed = count_effect(instruction)
    if num_popped > len(stack):
        raise UnsupportedBytecodeError(f"{instruction.opname} pops more values than the stack has")
    if instruction.opname in SHUFFLES:
        return _shuffle(instruction.opname, instruction.arg or 0, stack)
    kept, popped = stack[: len(stack) - num_popped], stack[len(stack) - num_popped :]
    if instruction.opname in UPDATES:
        return _update(instruction, kept, popped)
    accesses = list_accesses(instruction)
    pushed = _load(instruction, accesses) if accesses else _push(instruction, popped)
    if len(pushed) == num_pushed:
        return kept + pushed
    # The NULL of a call: below a global until Python 3.12, above it later; above a method's name.
    is_below = instruction.opname == "LOAD_GLOBAL" and VERSION < (3, 13)
    return (*kept, _NULL, *pushed) if is_below else (*kept, *pushed, _NULL)


def _after_jump(instruction: dis.Instruction, stack: Stack) -> Stack:
    """The stack at the target of a jump."""
    name = instruction.opname
    if name == "FOR_ITER":  # from Python 3.12 on the instruction at the target pops the iterator
        return stack[:-1] if VERSION < (3, 12) else (*stack, _NULL)
    if name == "SEND" and VERSION < (3, 12):
        return (*stack[:-2], _item(stack[-2]))
    return stack if name.endswith("_OR_POP") else _after(instruction, stack)


def _shuffle(name: str, arg: int, stack: Stack) -> Stack:
    if name == "COPY":
        return (*stack, stack[-arg])
    if name.startswith("DUP_TOP"):
        return (*stack, *stack[-2 if name == "DUP_TOP_TWO" else -1 :])
    if name == "SWAP":
        return (*stack[:-arg], stack[-1], *stack[len(stack) - arg + 1 : -1], stack[-arg])
    num_rotated = {"ROT_TWO": 2, "ROT_THREE": 3, "ROT_FOUR": 4}.get(name, arg)
    return (*stack[:-num_rotated], stack[-1], *stack[-num_rotated:-1])


def _update(instruction: dis.Instruction, kept: Stack, popped: Stack) -> Stack:
    """A container on the stack gets what was popped. What a comprehension fills is no constant."""
    depth, name = instruction.arg or 0, instruction.opname
    container = kept[-depth]
    text = container.text
    if name == "LIST_EXTEND" and text == "[]":  # a display of constants begins with an empty list
        text = f"[{popped[0].text[1:-1]}]" if popped[0].kind == "constant" else "[...]"
    is_constant = _is_constant(popped) and not name.endswith(("_APPEND", "_ADD"))
    kind = container.kind if is_constant else "value"
    container = replace(container, kind=kind, text=text, names=container.names | _names_of(popped))
    return (*kept[:-depth], container, *kept[len(kept) - depth + 1 :])


def _load(instruction: dis.Instruction, accesses: list[tuple[str, str]]) -> Stack:
    # Offsets are even: the next one is free for the second value of a pair.
    return tuple(
        Operand(
            "cleared" if access == "clear" else "value",
            names=frozenset({name}),
            text=name,
            path=(name,),
            origins=frozenset({instruction.offset + number}),
        )
        for number, (access, name) in enumerate(accesses)
        if access in ("load", "clear")
    )


def _push(instruction: dis.Instruction, popped: Stack) -> Stack:
    """The values that an instruction pushes; without the NULL of a call."""
    name = instruction.opname
    if name in COMPUTATIONS and _NULL in popped:
        raise UnsupportedBytecodeError(f"{name} uses a NULL")
    if name in _PUSHED:
        return _PUSHED[name](popped)
    if name == "LOAD_CONST":
        value = instruction.argval
        result = Operand("constant", text="a function" if inspect.iscode(value) else repr(value))
    elif name in _ATTRIBUTES:
        result = _attribute(instruction, popped)
    elif name in CALLS:
        result = _call(popped)
    elif name in _BRACKETS:
        items = ", ".join(operand.text for operand in popped)
        text = f"{_BRACKETS[name][0]}{items}{_BRACKETS[name][1]}"
        kind = "constant" if _is_constant(popped) else "value"
        result = Operand(kind, _names_of(popped), text)
    else:
        result = Operand("value", _names_of(popped), _expression(instruction, popped))
    result = replace(result, text=_shorten(result.text), origins=frozenset({instruction.offset}))
    num_pushed = 1 if name in _ATTRIBUTES else count_effect(instruction)[1]
    return (result,) * num_pushed


def _attribute(instruction: dis.Instruction, popped: Stack) -> Operand:
    owner, name = popped[-1], str(instruction.argval)
    if instruction.opname == "LOAD_SUPER_ATTR":
        owner = replace(owner, text="super()", path=("super",))
    is_known = owner.path and (not owner.is_call or owner.path == ("super",))
    return Operand(
        "value", owner.names, f"{owner.text}.{name}", (*owner.path, name) if is_known else ()
    )


def _call(popped: Stack) -> Operand:
    callee, arguments = split_callee(popped)
    return Operand(
        "value",
        _names_of(popped),
        f"{callee.text}({'...' if arguments else ''})",
        path=() if callee.is_call else callee.path,
        is_call=True,
        inner_paths=(arguments[0].path, *arguments[0].inner_paths) if arguments else (),
    )


def _expression(instruction: dis.Instruction, popped: Stack) -> str:
    if instruction.opname == "BINARY_SUBSCR":
        return f"{popped[0].text}[{popped[1].text}]"
    if instruction.opname == "BINARY_OP":
        return f"{popped[0].text} {instruction.argrepr} {popped[1].text}"
    names = ", ".join(sorted(_names_of(popped)))
    return f"an expression of {names}" if names else "a value"


def _item(iterator: Operand) -> Operand:
    return Operand("value", iterator.names, _shorten(f"an item of {iterator.text}"))


def _enter(popped: Stack) -> Stack:
    manager = popped[0]
    return replace(manager, kind="exit"), Operand("value", manager.names, manager.text)


def _next_item(popped: Stack) -> Stack:
    return popped[0], _item(popped[0])


def _begin_iteration(popped: Stack) -> Stack:
    return (replace(popped[0], kind="iterator"),)


def _function(popped: Stack) -> Stack:
    return (Operand("constant", _names_of(popped), "a function"),)


_PUSHED: dict[str, Callable[[Stack], Stack]] = {
    "PUSH_NULL": lambda _: (_NULL,),
    "PUSH_EXC_INFO": lambda popped: (_NULL, popped[0]),
    "LOAD_ASSERTION_ERROR": lambda _: (Operand("constant", text="AssertionError"),),
    "LOAD_BUILD_CLASS": lambda _: (Operand("constant", text="a class"),),
    "FOR_ITER": _next_item,
    "SEND": _next_item,
    "END_SEND": lambda popped: popped[1:],
    "GET_ITER": _begin_iteration,
    "GET_YIELD_FROM_ITER": _begin_iteration,
    "MAKE_FUNCTION": _function,
    "SET_FUNCTION_ATTRIBUTE": _function,
    "SETUP_WITH": _enter,
    "BEFORE_WITH": _enter,
    "BEFORE_ASYNC_WITH": _enter,
}
_BRACKETS = {
    "BUILD_TUPLE": "()",
    "BUILD_LIST": "[]",
    **dict.fromkeys(("BUILD_SET", "BUILD_MAP", "BUILD_CONST_KEY_MAP"), "{}"),
}


def _is_constant(values: Iterable[Operand]) -> bool:
    return all(operand.kind == "constant" for operand in values)


def _names_of(values: Iterable[Operand]) -> frozenset[str]:
    return frozenset().union(*(operand.names for operand in values))


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else f"{text[: _TEXT_LENGTH - 3]}..."
