"""The private random generators that a dataset or a function holds, however deep."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from resumekit.data.generators import GENERATOR_TYPES

# A dataset may hold millions of records. What draws is near the top, and is looked at first.
_MOST_OBJECTS = 2000
_MOST_ITEMS = 50

_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), torch.Tensor, np.ndarray)
_OPAQUE = (type, ModuleType)
_CONTAINERS = (list, tuple, set, frozenset, deque)

# What a loader, or a transform inside a dataset, is called by.
_METHODS = ("__getitem__", "__getitems__", "__call__")


def held_generators(holders: Mapping[str, Any]) -> dict[str, Any]:
    """Every private generator that is held somewhere below, by dotted name, each once.

    Attributes, items of containers, closures, defaults and partial arguments are followed, and what
    the code that gets a sample names in its own module. Nothing is called.

    Args:
        holders: what to look into, by name.
    """
    waiting = deque(holders.items())
    seen = _global_generators()
    found: dict[str, Any] = {}
    while waiting and len(seen) < _MOST_OBJECTS:
        name, value = waiting.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if isinstance(value, GENERATOR_TYPES):
            found[name] = value
        elif not isinstance(value, _OPAQUE):
            waiting.extend((f"{name}.{part}", held) for part, held in _parts(value))
    return found


def _global_generators() -> set[int]:
    """The three that keys do reach, under whatever name they are held."""
    bound: tuple[Any, ...] = (random.seed, np.random.rand)
    return {id(torch.default_generator), *(id(method.__self__) for method in bound)}


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), value[key]) for key in islice(value, _MOST_ITEMS))
    elif isinstance(value, _CONTAINERS):
        yield from ((str(place), item) for place, item in enumerate(islice(value, _MOST_ITEMS)))
    elif isinstance(value, functools.partial):
        yield from _named(func=value.func, args=value.args, keywords=value.keywords)
    elif isinstance(value, MethodType):
        yield from _named(__self__=value.__self__, __func__=value.__func__)
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    else:
        yield from dict(getattr(value, "__dict__", {})).items()
        yield from _parts_of_class(type(value))


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, GENERATOR_TYPES):
                yield name, value
    for name in _METHODS:
        function = getattr(kind, name, None)
        if isinstance(function, FunctionType):
            yield name, function


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, variables = function.__code__, function.__globals__
    for name in code.co_names:
        value = variables.get(name)
        beside = isinstance(value, FunctionType) and value.__globals__ is variables
        if beside or isinstance(value, GENERATOR_TYPES):
            yield name, value
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from _named(defaults=function.__defaults__, keyword_defaults=function.__kwdefaults__)


def _named(**parts: Any) -> Iterator[tuple[str, Any]]:
    yield from parts.items()
