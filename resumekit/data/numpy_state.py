"""The state of NumPy's global generator, asked for in full only when it has changed.

``np.random.get_state`` takes some 25 microseconds, because NumPy copies 624 numbers one by one. To
see that nothing has changed takes one: the bytes that the state is made of are the same.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

import numpy as np

# The twister's key, then its position, and half of a pair of normal numbers, if there is one.
PACKED = struct.Struct("<2496sqqd")
# numpy 2.4 random/src/mt19937/mt19937.h: uint32_t key[624]; int pos;
_TWISTER = struct.Struct("<2496si")
_OBJECT_HEADER_BYTES = 16  # the reference count and the type


class NumpyState:
    """Reads the state of ``np.random``; what it reads is what ``get_state`` gives.

    The bytes are those of the twister, at the address that NumPy tells, and of the RandomState
    object, which holds the half of a pair. That they are all of the state is not believed: it is
    tried once on a generator of our own, and the twister's are compared at each full read. Where
    either fails, every read is a full one.
    """

    def __init__(self) -> None:
        self._sees_all = _bytes_tell_all()
        self._seen: tuple[bytes, bytes] | None = None
        self._packed: bytes | None = None

    def read(self) -> bytes | None:
        """The state, packed; None if a user has put another kind of generator in its place."""
        owner: Any = np.random.get_state.__self__  # type: ignore[attr-defined]  # a bound method
        twister = owner._bit_generator  # as np.random.get_bit_generator() gives it
        if type(twister) is not np.random.MT19937:
            return None
        seen = _bytes_of(owner, twister) if self._sees_all else None
        if seen is None or seen != self._seen:
            state = owner.get_state(legacy=False)
            inner = state["state"]
            key = np.asarray(inner["key"]).tobytes()
            self._packed = PACKED.pack(key, inner["pos"], state["has_gauss"], state["gauss"])
            self._sees_all = seen is not None and seen[0] == _TWISTER.pack(key, inner["pos"])
            self._seen = seen if self._sees_all else None
        return self._packed


def _bytes_of(owner: Any, twister: Any) -> tuple[bytes, bytes]:
    size = type(owner).__basicsize__ - _OBJECT_HEADER_BYTES
    return (
        ctypes.string_at(twister.ctypes.state_address, _TWISTER.size),
        ctypes.string_at(id(owner) + _OBJECT_HEADER_BYTES, size),
    )


@cache
def _bytes_tell_all() -> bool:
    """Whether the bytes differ when half of a pair is drawn, and while nothing is drawn do not."""
    twister = np.random.MT19937(0)
    own = np.random.RandomState(twister)
    own.standard_normal()
    with_half = _bytes_of(own, twister)
    unchanged = with_half == _bytes_of(own, twister)
    own.standard_normal()
    without = _bytes_of(own, twister)
    return unchanged and with_half[0] == without[0] and with_half[1] != without[1]
