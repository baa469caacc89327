"""Which attributes the code of libraries sets in objects of the user's: those are no user state."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from resumekit.capture.user_state.value_types import top_package


def attributes_set_by(libraries: frozenset[str], kind: Any) -> frozenset[str]:
    """The names of the attributes that the code of some libraries sets in objects of a class.

    They are read from the bytecode of the base classes, so what is left is the user's in every
    version. A hand-kept list would hold 87 names for transformers' Trainer 5.23, 181 for TRL's
    GRPOTrainer 1.16 and 21 for LightningModule 2.6. Reading takes up to 0.3 s, once for each class.

    Args:
        libraries: the names of their top-level packages.
        kind: the class.
    """
    return _of_class(libraries, kind)


@functools.cache
def _of_class(libraries: frozenset[str], kind: Any) -> frozenset[str]:
    return _set_in(tuple(each for each in kind.__mro__ if top_package(each) in libraries))


def attributes_set_in(value: Any, method: str) -> frozenset[str]:
    """The names of the attributes that one method of an object sets; none where it has no such.

    Args:
        value: the object.
        method: the method's name.
    """
    return frozenset(_set_by_member(inspect.getattr_static(type(value), method, None)))


@functools.cache
def _set_in(kinds: tuple[type, ...]) -> frozenset[str]:
    members = (member for each in kinds for member in vars(each).values())
    return frozenset(name for member in members for name in _set_by_member(member))


def _set_by_member(member: Any) -> Iterator[str]:
    """What a function sets, whatever it is decorated with."""
    accessors = [getattr(member, name, None) for name in ("fget", "fset", "__func__", "func")]
    for each in (member, *accessors):
        code = getattr(inspect.unwrap(each), "__code__", None) if callable(each) else None
        if code is not None:
            yield from _set_by(code)


def _set_by(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _set_by(constant)
