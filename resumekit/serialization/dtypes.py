"""The element types a tensor in a payload may have, and other constants of torch, by name.

The list of element types is part of the format: a name that is not in it is damage, a name that is
in it but that the running torch does not have needs a newer torch.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from resumekit.serialization.limits import checked_shape


@dataclass(frozen=True)
class ElementType:
    """One element type of the format.

    Args:
        name: torch's name of it, without ``torch.``.
        num_bytes: the size of one element.
        code: its name in a safetensors header. None where stock readers do not know it: such a
            tensor stands there as ``U8`` with one more dimension, the bytes of an element.
    """

    name: str
    num_bytes: int
    code: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The running torch's type; None where this torch has none of that name."""
        found = getattr(torch, self.name, None)
        return found if isinstance(found, torch.dtype) else None

    @property
    def dtype(self) -> torch.dtype:
        """The running torch's type, of an element type from ``known_element``."""
        assert self.torch_dtype is not None
        return self.torch_dtype


# With a code: what every safetensors since 0.4 reads. One code that a reader does not know makes it
# refuse the whole file, so the newer ones (C64, F8_E8M0, ...) are not used.
_TYPES = (
    ElementType("float64", 8, "F64"),
    ElementType("float32", 4, "F32"),
    ElementType("float16", 2, "F16"),
    ElementType("bfloat16", 2, "BF16"),
    ElementType("int64", 8, "I64"),
    ElementType("int32", 4, "I32"),
    ElementType("int16", 2, "I16"),
    ElementType("int8", 1, "I8"),
    ElementType("uint64", 8, "U64"),
    ElementType("uint32", 4, "U32"),
    ElementType("uint16", 2, "U16"),
    ElementType("uint8", 1, "U8"),
    ElementType("bool", 1, "BOOL"),
    ElementType("float8_e4m3fn", 1, "F8_E4M3"),
    ElementType("float8_e5m2", 1, "F8_E5M2"),
    ElementType("float8_e4m3fnuz", 1),
    ElementType("float8_e5m2fnuz", 1),
    ElementType("float8_e8m0fnu", 1),
    ElementType("float4_e2m1fn_x2", 1),
    ElementType("complex32", 4),
    ElementType("complex64", 8),
    ElementType("complex128", 16),
    ElementType("bits8", 1),
    ElementType("bits16", 2),
    ElementType("bits1x8", 1),
    ElementType("bits2x4", 1),
    ElementType("bits4x2", 1),
    *(ElementType(f"{sign}int{bits}", 1) for sign in ("", "u") for bits in range(1, 8)),
)

ELEMENT_TYPES: dict[str, ElementType] = {item.name: item for item in _TYPES}


# The values of these types that this torch has, by the name that ``str`` gives: a name in a file is
# looked up here and nowhere else.
TORCH_CONSTANTS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}


_BY_DTYPE = {item.torch_dtype: item for item in _TYPES}


def element_type(dtype: torch.dtype) -> ElementType | None:
    """The format's element type of a torch dtype; None where the format has none (quantised)."""
    return _BY_DTYPE.get(dtype)


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
