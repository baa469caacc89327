"""The element types a tensor in a payload may have, by name.

The list is part of the format: a name that is not in it is damage, a name that is in it but that
the running torch does not have needs a newer torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


def element_type(dtype: torch.dtype) -> ElementType | None:
    """The format's element type of a torch dtype; None where the format has none (quantised)."""
    return ELEMENT_TYPES.get(str(dtype).removeprefix("torch."))
