"""The instructions of CPython 3.10 to 3.13: what each pops, pushes, reads and writes.

An instruction without a row in these tables raises `UnsupportedBytecodeError`: its effect would be
a guess. A test compares the tables with `dis.stack_effect` on each version.

Source: Python/ceval.c (3.10, 3.11) and Python/bytecodes.c (3.12, 3.13) of CPython.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType

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
