"""The values that a suspended iterator can still read: is it independent of what changes now?"""

from __future__ import annotations

import dis
import gc
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_NAMED = frozenset((*dis.haslocal, *dis.hasfree))


def still_read(iterator: Any) -> list[Any]:
    """The objects that an iterator can still read from.

    Of a generator, these are the local variables that the rest of its code uses, and what it
    iterates; of other built-in iterators, what they iterate. Iterators and functions among them are
    replaced by what they read, so that the result holds neither.

    Args:
        iterator: it is suspended, or was not started.
    """
    found: list[Any] = []
    waiting, met = [iterator], dict[int, Any]()
    while waiting:
        value = waiting.pop()
        if id(value) in met:
            continue
        met[id(value)] = value
        parts = _parts(value)
        if parts is None:
            found.append(value)
        else:
            waiting += parts
    return found


def _parts(value: Any) -> list[Any] | None:
    """What is read through an iterator or a function; None for any other object."""
    if isinstance(value, types.GeneratorType):
        return _read_by_generator(value)
    if isinstance(value, types.CellType):
        return gc.get_referents(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.BuiltinMethodType):  # of a list, or a function of a module
        return [] if isinstance(value.__self__, types.ModuleType) else [value.__self__]
    if isinstance(value, types.FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    is_builtin = isinstance(value, Iterator) and not type(value).__dictoffset__
    return gc.get_referents(value) if is_builtin else None


def _read_by_generator(generator: types.GeneratorType[Any, Any, Any]) -> list[Any]:
    """The values on the stack of a generator, and those of its variables that it may use again."""
    frame = generator.gi_frame
    if frame is None:
        return []  # it is over
    values = frame.f_locals
    unused = [each for name, each in values.items() if name not in _used_from(frame)]
    # CPython 3.10 Objects/frameobject.c frame_traverse and 3.11 to 3.13 Python/frame.c
    # _PyFrame_Traverse visit each variable, cell and stack entry, and these:
    machinery = (frame, values, frame.f_code, frame.f_globals, frame.f_builtins, frame.f_back)
    read: list[Any] = []
    for each in (*gc.get_referents(generator), *gc.get_referents(frame)):
        is_own_code = isinstance(each, types.FunctionType) and each.__code__ is frame.f_code
        if is_own_code or any(each is part for part in machinery):
            continue
        index = next((i for i, other in enumerate(unused) if _holds(each, other)), None)
        if index is None:
            read.append(each)
        else:
            del unused[index]
    return read


def _used_from(frame: types.FrameType) -> set[str]:
    """The variables that the code names where it may still come to."""
    instructions = list(dis.get_instructions(frame.f_code))
    first, former = frame.f_lasti, -1
    while first != former:  # a jump back leads to the start of a loop
        former = first
        targets = (e.argval for e in instructions if e.offset >= former and e.opcode in _JUMPS)
        first = min((former, *targets))
    used: set[str] = set()
    for each in instructions:
        if each.offset >= first and each.opcode in _NAMED:
            used.update(each.argval if isinstance(each.argval, tuple) else (each.argval,))
    return used


def _holds(referent: Any, value: Any) -> bool:
    """Whether it is the value, or the cell of a variable that holds it."""
    if isinstance(referent, types.CellType):
        return any(each is value for each in gc.get_referents(referent))
    return referent is value
