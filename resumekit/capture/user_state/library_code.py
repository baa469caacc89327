"""Which attributes of an object are set by the code of libraries, and which by the user's."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any


def attributes_set_by(libraries: frozenset[str], kind: Any) -> frozenset[str]:
    """The names of the attributes that the code of some libraries sets in objects of a class.

    They are read from the code of the classes that it is derived from, so that what is left is the
    user's own in every version.

    Args:
        libraries: the names of their top-level packages.
        kind: the class.
    """
    return _set_in(_classes_of(libraries, kind))


def attributes_set_in(value: Any, method: str) -> frozenset[str]:
    """The names of the attributes that one method of an object sets; none where it has no such.

    Args:
        value: the object.
        method: the method's name.
    """
    member = inspect.getattr_static(type(value), method, None)
    return frozenset(name for code in _codes_of(member) for name in _set_by(code))


@cache
def _classes_of(libraries: frozenset[str], kind: Any) -> tuple[type, ...]:
    """The classes of some libraries that a class is derived from."""
    return tuple(each for each in kind.__mro__ if each.__module__.partition(".")[0] in libraries)


@cache
def _set_in(kinds: tuple[type, ...]) -> frozenset[str]:
    return frozenset(
        name
        for each in kinds
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
