"""Which attributes of a Trainer are set by the libraries, and which by a class of the user's."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

# What their Trainers keep between two steps is known by name, or told to be unknown.
_LIBRARIES = frozenset({"transformers", "trl"})


def attributes_of_libraries(trainer: Any) -> frozenset[str]:
    """The names of the attributes that the code of transformers' and TRL's Trainers sets.

    They are read from that code, so that what is left is the user's own in every version.

    Args:
        trainer: the ``transformers.Trainer``, or one of a class derived from it.
    """
    theirs = (c for c in type(trainer).__mro__ if c.__module__.partition(".")[0] in _LIBRARIES)
    return frozenset(
        name
        for each in theirs
        for member in vars(each).values()
        for code in _codes_of(member)
        for name in _set_by(code)
    )


def _codes_of(member: Any) -> Iterator[CodeType]:
    """Of a function, whatever it is decorated with."""
    accessors = [getattr(member, name, None) for name in ("fget", "fset", "__func__", "func")]
    for each in (member, *accessors):
        code = getattr(inspect.unwrap(each), "__code__", None) if callable(each) else None
        if code is not None:
            yield code


def _set_by(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _set_by(constant)
