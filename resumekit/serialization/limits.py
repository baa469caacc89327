"""What writing and reading accept alike: what a load refuses, a save has refused already."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Hashable
from keyword import iskeyword
from typing import Any

# Levels of JSON. The parser allows 64; two are the index's own, the last value takes some more.
MAX_DEPTH = 40

# A namedtuple type costs a tenth of a millisecond to make.
MAX_NAMEDTUPLE_TYPES = 1000
_MAX_NAMEDTUPLE_FIELDS = 1000

_MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 48
_MAX_ELEMENTS = 1 << 60

# Keys with one and the same hash make a dict quadratic; ordinary keys have two (-1 and -2) at most.
_MAX_EQUAL_HASHES = 100


# The default_factory that a defaultdict may have, by name.
FACTORIES: dict[str | None, Callable[[], Any] | None] = {
    None: None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)},
}


def hash_flood(keys: Collection[Hashable]) -> bool:
    """Whether so many keys share one hash that a dict of them would take for ever."""
    if len(keys) <= _MAX_EQUAL_HASHES:
        return False
    return max(collections.Counter(map(hash, keys)).values()) > _MAX_EQUAL_HASHES


def namedtuple_type(name: Any, fields: Any) -> type[Any] | None:
    """A namedtuple type of this name and these fields; None where Python allows none."""
    names = [name, *fields] if isinstance(fields, list) else [name, fields]
    if not all(isinstance(item, str) and item.isidentifier() for item in names):
        return None
    if any(iskeyword(item) for item in names) or len(names) > _MAX_NAMEDTUPLE_FIELDS:
        return None
    if any(field.startswith("_") for field in fields) or len(set(fields)) != len(fields):
        return None
    made: type[Any] = collections.namedtuple(name, fields)  # type: ignore[misc]
    return made


def typed(kind: type[Any], value: Any) -> Any:
    """A value from JSON that may hold anything.

    Raises:
        ValueError: it is not of this type.
    """
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:80]!r} is not of type {kind.__name__}")
    return value


def checked_sizes(sizes: Any) -> tuple[int, ...]:
    """A shape, or strides, from JSON that may hold anything.

    Raises:
        ValueError: it is not a list of sizes.
    """
    if not isinstance(sizes, list) or len(sizes) > _MAX_DIMENSIONS:
        raise ValueError(f"{str(sizes)[:80]!r} is not a list of sizes")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise ValueError(f"{str(size)[:80]!r} is not a size")
    return tuple(sizes)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape from JSON that may hold anything.

    Raises:
        ValueError: it is not a shape, or one that torch and numpy cannot count the elements of.
    """
    checked = checked_sizes(shape)
    if math.prod(max(size, 1) for size in checked) > _MAX_ELEMENTS:
        raise ValueError(f"the shape {str(shape)[:80]} is too large")
    return checked
