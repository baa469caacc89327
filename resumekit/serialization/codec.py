"""Nested Python state as JSON and bytes, without pickle.

A value that JSON gives back as it is stands there plainly: None, bools, 64-bit ints, finite floats,
strings, lists, and dicts with string keys. Everything else is an object with one key that begins
with ``$``:

================  =====================================================================
``$int``          an int beyond 64 bits, hexadecimal
``$float``        nan or an infinity, the 16 hexadecimal digits of its bits
``$complex``      its real and imaginary part
``$str``          a string that holds surrogates, hexadecimal UTF-8
``$bytes``        bytes, hexadecimal; long ones are in the data file: ``$blob``, by name
``$numbers``      a long list of nothing but 64-bit ints or of floats: dtype, the name of its bytes
``$tuple``        the elements; ``$set`` likewise, in a fixed order
``$dict``         keys and values by turns; ``$ordered_dict`` and ``$counter`` likewise
``$default_dict`` the name of the builtin factory or null, then keys and values
``$deque``        the maximal length or null, then the elements
``$namedtuple``   the type's name, the names of the fields, the elements
``$scalar``       a numpy scalar: dtype, hexadecimal bytes; ``$numpy_str``, ``$numpy_bytes``
``$array``        a numpy array: dtype, shape, ``"C"`` or ``"F"``, the name of its bytes
``$tensor``       the name of a tensor, or a view of one: of, dtype, shape, strides, offset in bytes
================  =====================================================================

What comes back is equal and of the same type, with these exceptions: an enum comes back as its
value, an ``nn.Parameter`` as a plain tensor, a namedtuple as a new type of the same name and fields
(equal to the old one), any tensor on the CPU, a tensor with holes in memory without the holes.
Tensors that share memory share it again; of lists and dicts only the values are kept. Anything else
is refused, by its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from resumekit.serialization.decode import Decoder
from resumekit.serialization.encode import Encoder
from resumekit.serialization.leaves import Leaf


@dataclass(frozen=True)
class Encoded:
    """State in storable form.

    Args:
        tree: what JSON takes; refers to the tensors by name.
        tensors: what goes into the data file, by name; still the live memory, nothing is copied.
        ties: names of tensors that have no bytes of their own, with the name of the same tensor.
    """

    tree: Any
    tensors: dict[str, Leaf]
    ties: dict[str, str]


def encode(value: Any, *, where: str) -> Encoded:
    """The value in storable form; no copy of a tensor is made.

    Args:
        value: nested state.
        where: what error messages call it, e.g. ``"extras"``.

    Raises:
        UnsupportedValueError: a part of it cannot be stored; names the place.
    """
    encoder = Encoder()
    tree = encoder.encode(value, where=where)
    stored = encoder.finish()
    return Encoded(tree, stored.leaves, stored.ties)


def decode(tree: Any, tensors: Mapping[str, torch.Tensor], *, where: str = "payload") -> Any:
    """The value that was encoded.

    Args:
        tree: from ``encode``.
        tensors: for each name in the tree a CPU tensor with the bytes of its leaf. They become part
            of the value.
        where: what error messages call it.

    Raises:
        CorruptCheckpointError: the tree is not one that ``encode`` makes.
        FormatVersionError: it needs a newer torch.
    """
    return Decoder(tensors, where=where).decode(tree)
