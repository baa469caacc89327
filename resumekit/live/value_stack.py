"""The stack of a running function before each of its instructions, by simulation.

Tables say what each instruction of CPython 3.10 to 3.13 pops, pushes, reads and writes. One without
a row raises `UnsupportedBytecodeError`: its effect would be a guess. A test compares the tables
with `dis.stack_effect` on each version.

The simulation runs forward over all paths, also those of exceptions: by the exception table from
Python 3.11 on, by blocks before. A value stands for what it was computed from.

Source: Python/ceval.c (3.10, 3.11), Python/bytecodes.c (3.12, 3.13) and
Objects/exception_handling_notes.txt of CPython.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple

VERSION = sys.version_info[:2]
NUM_CACHED = 512  # results by code object
_HAS_NULL = VERSION >= (3, 11)  # a NULL lies next to the callee of a call that is not a method's
_HAS_METHOD_BIT = VERSION >= (3, 12)  # of LOAD_ATTR, in the role of LOAD_METHOD


class UnsupportedBytecodeError(Exception):
    """The code has an instruction, or the interpreter a version, whose effect is not known."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARITHMETIC = [
    f"{kind}_{operator}"
    for kind in ("BINARY", "INPLACE")
    for operator in _words(
        "ADD AND FLOOR_DIVIDE LSHIFT MATRIX_MULTIPLY MODULO MULTIPLY OR POWER RSHIFT SUBTRACT "
        "TRUE_DIVIDE XOR"
    )
]
TESTS = frozenset(
    f"POP_JUMP_{direction}IF_{test}"
    for direction in ("", "FORWARD_", "BACKWARD_")
    for test in ("TRUE", "FALSE", "NONE", "NOT_NONE")
)
JUMPS = _words("JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP_ABSOLUTE")
TERMINATORS = JUMPS | _words("RETURN_VALUE RETURN_CONST RAISE_VARARGS RERAISE")
SETUPS = _words("SETUP_FINALLY SETUP_WITH SETUP_ASYNC_WITH")  # of Python 3.10
CALLS = _words("CALL CALL_KW CALL_FUNCTION CALL_FUNCTION_KW CALL_FUNCTION_EX CALL_METHOD")
SHUFFLES = _words("COPY SWAP DUP_TOP DUP_TOP_TWO ROT_TWO ROT_THREE ROT_FOUR ROT_N")
# They add what they pop to a container deeper in the stack.
UPDATES = _words("LIST_APPEND SET_ADD MAP_ADD LIST_EXTEND SET_UPDATE DICT_UPDATE DICT_MERGE")
# Computations that change nothing but their result.
COMPUTATIONS = frozenset(ARITHMETIC) | _words(
    "BINARY_OP BINARY_SUBSCR BINARY_SLICE COMPARE_OP IS_OP CONTAINS_OP UNARY_INVERT UNARY_NEGATIVE "
    "UNARY_NOT UNARY_POSITIVE TO_BOOL FORMAT_SIMPLE FORMAT_WITH_SPEC FORMAT_VALUE CONVERT_VALUE "
    "BUILD_TUPLE BUILD_LIST BUILD_STRING BUILD_MAP BUILD_CONST_KEY_MAP LOAD_ATTR LOAD_METHOD"
)

# What an instruction does with variables, in this order; a pair of names has two of them.
_ACCESSES = {
    **dict.fromkeys(
        _words(
            "LOAD_FAST LOAD_FAST_CHECK LOAD_CLOSURE LOAD_DEREF LOAD_CLASSDEREF LOAD_NAME "
            "LOAD_GLOBAL LOAD_FROM_DICT_OR_DEREF LOAD_FROM_DICT_OR_GLOBALS"
        ),
        ("load",),
    ),
    **dict.fromkeys(_words("STORE_FAST STORE_DEREF STORE_NAME STORE_GLOBAL"), ("store",)),
    **dict.fromkeys(_words("DELETE_FAST DELETE_DEREF DELETE_NAME DELETE_GLOBAL"), ("delete",)),
    "LOAD_FAST_AND_CLEAR": ("clear",),
    "LOAD_FAST_LOAD_FAST": ("load", "load"),
    "STORE_FAST_LOAD_FAST": ("store", "load"),
    "STORE_FAST_STORE_FAST": ("store", "store"),
}

# Numbers of values popped and pushed. What an instruction only looks at counts as neither.
_EFFECTS = """
0 0 NOP EXTENDED_ARG RESUME COPY_FREE_VARS MAKE_CELL KW_NAMES PRECALL POP_BLOCK SETUP_ANNOTATIONS
0 0 SETUP_FINALLY SETUP_ASYNC_WITH SWAP ROT_TWO ROT_THREE ROT_FOUR ROT_N RETURN_CONST
0 0 ASYNC_GEN_WRAP
0 1 LOAD_CONST LOAD_ASSERTION_ERROR LOAD_BUILD_CLASS LOAD_LOCALS PUSH_NULL COPY DUP_TOP IMPORT_FROM
0 1 MATCH_MAPPING MATCH_SEQUENCE GET_LEN GET_ANEXT WITH_EXCEPT_START RETURN_GENERATOR
0 2 DUP_TOP_TWO
1 0 POP_TOP PRINT_EXPR IMPORT_STAR RETURN_VALUE DELETE_ATTR GEN_START LIST_APPEND SET_ADD
1 0 LIST_EXTEND SET_UPDATE DICT_UPDATE DICT_MERGE JUMP_IF_TRUE_OR_POP JUMP_IF_FALSE_OR_POP
1 1 UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE TO_BOOL LIST_TO_TUPLE FORMAT_SIMPLE
1 1 CONVERT_VALUE GET_ITER GET_YIELD_FROM_ITER GET_AWAITABLE GET_AITER YIELD_VALUE CALL_INTRINSIC_1
1 1 CHECK_EXC_MATCH COPY_DICT_WITHOUT_KEYS
1 2 BEFORE_WITH BEFORE_ASYNC_WITH SETUP_WITH PUSH_EXC_INFO FOR_ITER
2 0 STORE_ATTR DELETE_SUBSCR JUMP_IF_NOT_EXC_MATCH MAP_ADD
2 1 BINARY_OP BINARY_SUBSCR COMPARE_OP IS_OP CONTAINS_OP FORMAT_WITH_SPEC IMPORT_NAME END_SEND
2 1 CALL_INTRINSIC_2 PREP_RERAISE_STAR YIELD_FROM SET_FUNCTION_ATTRIBUTE
2 2 CHECK_EG_MATCH SEND
3 0 STORE_SUBSCR
3 1 BINARY_SLICE
3 2 CLEANUP_THROW
4 0 STORE_SLICE
"""
_FIXED = {
    name: (int(popped), int(pushed))
    for popped, pushed, *names in map(str.split, _EFFECTS.strip().splitlines())
    for name in names
}
_FIXED.update(dict.fromkeys(ARITHMETIC, (2, 1)), **dict.fromkeys(TESTS, (1, 0)))
_FIXED.update(dict.fromkeys(JUMPS, (0, 0)), END_FOR=(2 if VERSION < (3, 13) else 1, 0))
if VERSION < (3, 11):
    _FIXED.update(POP_EXCEPT=(3, 0), RERAISE=(3, 0), END_ASYNC_FOR=(7, 0))
    _FIXED.update(MATCH_CLASS=(3, 2), MATCH_KEYS=(0, 2))
else:
    _FIXED.update(POP_EXCEPT=(1, 0), RERAISE=(1, 0), END_ASYNC_FOR=(2, 0))
    _FIXED.update(MATCH_CLASS=(3, 1), MATCH_KEYS=(0, 1))


def _count_defaults(arg: int) -> int:
    """What MAKE_FUNCTION pops: code, before 3.11 a name, before 3.13 what the bits announce."""
    return 1 if VERSION >= (3, 13) else bin(arg & 15).count("1") + 1 + (not _HAS_NULL)


# The same, by the instruction's argument.
_COUNTED: dict[str, Callable[[int], tuple[int, int]]] = {
    "BUILD_TUPLE": lambda arg: (arg, 1),
    "BUILD_LIST": lambda arg: (arg, 1),
    "BUILD_SET": lambda arg: (arg, 1),
    "BUILD_STRING": lambda arg: (arg, 1),
    "BUILD_MAP": lambda arg: (2 * arg, 1),
    "BUILD_CONST_KEY_MAP": lambda arg: (arg + 1, 1),
    "BUILD_SLICE": lambda arg: (3 if arg == 3 else 2, 1),
    "FORMAT_VALUE": lambda arg: (2 if arg & 4 else 1, 1),
    "RAISE_VARARGS": lambda arg: (arg, 0),
    "UNPACK_SEQUENCE": lambda arg: (1, arg),
    "UNPACK_EX": lambda arg: (1, (arg & 0xFF) + 1 + (arg >> 8)),
    "CALL": lambda arg: (arg + 2, 1),
    "CALL_KW": lambda arg: (arg + 3, 1),
    "CALL_FUNCTION": lambda arg: (arg + 1, 1),
    "CALL_FUNCTION_KW": lambda arg: (arg + 2, 1),
    "CALL_FUNCTION_EX": lambda arg: (2 + (arg & 1) + _HAS_NULL, 1),
    "CALL_METHOD": lambda arg: (arg + 2, 1),
    "LOAD_ATTR": lambda arg: (1, 1 + (arg & _HAS_METHOD_BIT)),
    "LOAD_METHOD": lambda _: (1, 2),
    "LOAD_SUPER_ATTR": lambda arg: (3, 1 + (arg & 1)),
    "MAKE_FUNCTION": lambda arg: (_count_defaults(arg), 1),
}


def count_effect(instruction: dis.Instruction) -> tuple[int, int]:
    """Returns the number of values that an instruction pops, and the number that it pushes.

    Raises:
        UnsupportedBytecodeError: the instruction is not known.
    """
    name, arg = instruction.opname, instruction.arg or 0
    if name in _ACCESSES:
        kinds = _ACCESSES[name]
        with_null = name == "LOAD_GLOBAL" and _HAS_NULL and bool(arg & 1)
        num_loads = kinds.count("load") + kinds.count("clear")
        return kinds.count("store") + name.startswith("LOAD_FROM_DICT"), num_loads + with_null
    if name in _FIXED:
        return _FIXED[name]
    if name in _COUNTED:
        return _COUNTED[name](arg)
    raise UnsupportedBytecodeError(f"instruction {name} of Python {VERSION} is not known")


def list_accesses(instruction: dis.Instruction) -> list[tuple[str, str]]:
    """Returns what an instruction does with variables: load, store, delete or clear, and a name."""
    names = instruction.argval
    kinds = _ACCESSES.get(instruction.opname, ())
    return list(zip(kinds, names if isinstance(names, tuple) else (names,), strict=False))


@lru_cache(maxsize=NUM_CACHED)
def read_instructions(code: CodeType) -> dict[int, dis.Instruction]:
    """Returns the instructions of a code by their offset, without inline caches.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    if sys.implementation.name != "cpython" or not (3, 10) <= VERSION <= (3, 13):
        found = f"{sys.implementation.name} {VERSION[0]}.{VERSION[1]}"
        raise UnsupportedBytecodeError(f"bytecode of {found}, expected CPython 3.10 to 3.13")
    instructions = {instruction.offset: instruction for instruction in dis.get_instructions(code)}
    for instruction in instructions.values():
        count_effect(instruction)
    return instructions


def iter_nested(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of the functions and classes that a code defines, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from iter_nested(constant)


def find_executed(code: CodeType, lasti: int) -> int:
    """Returns the offset of the instruction that a frame with this `f_lasti` executes.

    `f_lasti` may point into the inline cache of an instruction. On Python 3.11 a call has two
    instructions, and a specialized one runs in the first; this is the second in both cases.

    Raises:
        UnsupportedBytecodeError: an instruction or the interpreter is not known.
    """
    instructions = read_instructions(code)
    offset = max(offset for offset in instructions if offset <= max(lasti, 0))
    if instructions[offset].opname == "PRECALL":
        return min(later for later in instructions if later > offset)
    return offset


# ---------------------------------------------------------------- the simulation

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
