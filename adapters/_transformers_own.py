"""What of a Trainer is the libraries' code, and what is the user's."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, SimpleNamespace
from typing import Any

from torch import nn

# What their Trainers keep between two steps is known by name, or told to be unknown.
_LIBRARIES = frozenset({"transformers", "trl"})

# transformers 5.23 trainer.py, trl 1.16 grpo_trainer.py, rloo_trainer.py: what it is given to call.
_CALLED = (
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "reward_funcs",
    "rollout_func",
)


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


def objects_called(trainer: Any) -> dict[str, Any]:
    """The objects that a Trainer was given to call in a step, by name; functions hold nothing.

    Modules, as models of a reward, are attributes of one holder, which stays theirs.

    Args:
        trainer: the ``transformers.Trainer``, or one of a class derived from it.
    """
    found: dict[str, Any] = {}
    modules = SimpleNamespace()
    for name in _CALLED:
        given = getattr(trainer, name, None)
        several = given if isinstance(given, (list, tuple)) else None
        for number, each in enumerate([given] if several is None else several):
            owner = getattr(each, "__self__", each)  # of a method the object whose it is
            own = name if several is None else f"{name}-{number}"
            if isinstance(owner, nn.Module):
                setattr(modules, own, owner)
            elif owner is not trainer and hasattr(owner, "__dict__") and not _is_code(owner):
                found[own] = owner
    return {**found, "called": modules} if vars(modules) else found


def _is_code(given: Any) -> bool:
    return inspect.isroutine(given) or inspect.isclass(given) or inspect.ismodule(given)


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
