"""numpy dtypes as plain JSON and back, without anything that could run code."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np

from resumekit.serialization.limits import checked_shape

# Fixed-size kinds only; what follows the digits is the unit of a datetime64 or timedelta64.
_SIMPLE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[A-Za-zμ]{1,2}\])?")
_MAX_FIELDS = 10_000
_MAX_NESTING = 8


def dtype_to_json(dtype: np.dtype[Any]) -> Any:
    """The dtype as a string or, for a structured one, as a list of fields.

    Raises:
        ValueError: it holds Python objects, or cannot be described exactly.
    """
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of the types that are refused below
        described = _as_lists(np.lib.format.dtype_to_descr(dtype))
    try:
        same = dtype_from_json(described) == dtype
    except ValueError:
        same = False
    if not same:
        raise ValueError("numpy cannot describe it in plain text")
    return described


def dtype_from_json(described: Any) -> np.dtype[Any]:
    """The inverse of ``dtype_to_json``; takes nothing else.

    Raises:
        ValueError: it does not describe a dtype.
    """
    try:
        return np.lib.format.descr_to_dtype(_checked(described))
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _as_lists(described: Any) -> Any:
    if isinstance(described, list | tuple):
        return [_as_lists(item) for item in described]
    return described


def _checked(described: Any, nesting: int = 0) -> Any:
    """The form that numpy expects, from JSON that may hold anything."""
    if isinstance(described, str) and _SIMPLE.fullmatch(described):
        return described
    if not isinstance(described, list) or nesting > _MAX_NESTING or len(described) > _MAX_FIELDS:
        raise ValueError(f"{str(described)[:80]!r} is not a dtype")
    return [_field(field, nesting) for field in described]


def _field(field: Any, nesting: int) -> tuple[Any, ...]:
    if not isinstance(field, list) or len(field) not in (2, 3):
        raise ValueError(f"{str(field)[:80]!r} is not a field")
    name = field[0]
    if isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name):
        name = tuple(name)  # a title and a name
    elif not isinstance(name, str):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a field")
    inner = _checked(field[1], nesting + 1)
    if len(field) == 2:
        return name, inner
    return name, inner, checked_shape(field[2])
