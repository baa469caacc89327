"""The state of the global generators of Python and NumPy, asked for in full only when it changed.

``random.getstate`` takes some 8 microseconds and ``np.random.get_state`` 25, several times that
after a training step has emptied the caches, because both hand out 624 numbers one by one. To see
that nothing has changed takes one: the bytes that the state is made of are the same.

Which bytes those are is not believed. They are tried once on a generator of our own, and compared
with the state at each full read; where either fails, every read is a full one.
"""

from __future__ import annotations

import ctypes
import random
import struct
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import numpy as np

# random.Random: version 3, 624 words and a position, then half of a pair of normal numbers or None.
PYTHON_WORDS = struct.Struct("<625I")
# CPython 3.11 Modules/_randommodule.c: int index; uint32_t state[624];
_PYTHON_OBJECT = struct.Struct("<i2496s")
# numpy 2.4 random/src/mt19937/mt19937.h: uint32_t key[624]; int pos;
_NUMPY_TWISTER = struct.Struct("<2496si")
_OBJECT_HEADER_BYTES = 16  # the reference count and the type


def python_state(generator: Any) -> dict[str, Any]:
    """The state of a ``random.Random``, or of the module ``random``."""
    version, words, gauss_next = generator.getstate()
    return {"version": version, "words": PYTHON_WORDS.pack(*words), "gauss_next": gauss_next}


class _GlobalState(ABC):
    """Reads the state of a global generator; draws nothing."""

    def __init__(self) -> None:
        self._sees_all = self._bytes_tell_all()
        self._seen: tuple[Any, ...] | None = None
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The state in plain values, not to be changed: the next read may give the same object."""
        seen = self._bytes() if self._sees_all else None
        if seen is None or seen != self._seen:
            self._state = self._in_full()
            if seen is not None:
                self._sees_all = self._agrees(seen)
            self._seen = seen if self._sees_all else None
        return self._state

    @abstractmethod
    def _bytes_tell_all(self) -> bool:
        """Whether the bytes of another generator show all that can change in it."""

    @abstractmethod
    def _bytes(self) -> tuple[Any, ...] | None:
        """What the state is made of; None if a user has put another kind of generator there."""

    @abstractmethod
    def _in_full(self) -> dict[str, Any]:
        """The state, as the library gives it."""

    @abstractmethod
    def _agrees(self, seen: tuple[Any, ...]) -> bool:
        """Whether these bytes are those of the state that was just read."""


class PythonState(_GlobalState):
    """That of ``random``: the bytes of its one ``Random``, and the half of a pair beside it."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: _Python | None = None

    def _bytes_tell_all(self) -> bool:
        return _python_bytes_tell_all()

    def _bytes(self) -> tuple[Any, ...] | None:
        owner = getattr(random.getstate, "__self__", None)
        if type(owner) is not random.Random:
            return None
        if self._watched is None or self._watched.owner is not owner:
            self._watched = _Python(owner)
        return self._watched.bytes()

    def _in_full(self) -> dict[str, Any]:
        return python_state(random)

    def _agrees(self, seen: tuple[Any, ...]) -> bool:
        return _is_python_state(seen, self._state)


class NumpyState(_GlobalState):
    """That of ``np.random``: the bytes of its twister, and of the object that holds the half."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: _Numpy | None = None

    def _bytes_tell_all(self) -> bool:
        return _numpy_bytes_tell_all()

    def _bytes(self) -> tuple[Any, ...] | None:
        owner: Any = np.random.get_state.__self__  # type: ignore[attr-defined]  # a bound method
        twister = owner._bit_generator  # as np.random.get_bit_generator() gives it
        if type(twister) is not np.random.MT19937:
            return None
        if self._watched is None or self._watched.twister is not twister:
            self._watched = _Numpy(owner, twister)
        return self._watched.bytes()

    def _in_full(self) -> dict[str, Any]:
        return dict(np.random.get_state(legacy=False))

    def _agrees(self, seen: tuple[Any, ...]) -> bool:
        inner = self._state["state"]
        return bool(seen[0] == _NUMPY_TWISTER.pack(inner["key"].tobytes(), inner["pos"]))


class _Python:
    """What the state of a ``random.Random`` is made of."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner  # its memory stays where it is while it is held
        self._object = _memory_of(owner)

    def bytes(self) -> tuple[bytes, Any]:
        return self._object.raw, self.owner.gauss_next


class _Numpy:
    """What the state of a RandomState over a twister is made of."""

    def __init__(self, owner: Any, twister: Any) -> None:
        self.twister = twister
        self._owner = owner
        self._object = _memory_of(owner)
        self._state = _memory(twister.ctypes.state_address, _NUMPY_TWISTER.size)

    def bytes(self) -> tuple[bytes, bytes]:
        return self._state.raw, self._object.raw


def _memory_of(owner: Any) -> ctypes.Array[ctypes.c_char]:
    size = type(owner).__basicsize__ - _OBJECT_HEADER_BYTES
    return _memory(id(owner) + _OBJECT_HEADER_BYTES, size)


def _memory(address: int, size: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size).from_address(address)


def _is_python_state(seen: tuple[Any, ...], state: dict[str, Any]) -> bool:
    *key, index = PYTHON_WORDS.unpack(state["words"])
    expected = _PYTHON_OBJECT.pack(index, struct.pack("<624I", *key))
    return bool(seen[0].startswith(expected)) and seen[1] == state["gauss_next"]


@cache
def _python_bytes_tell_all() -> bool:
    """Whether the bytes are those of the state, and while nothing is drawn stay as they are."""
    own = random.Random(0)
    own.gauss(0.0, 1.0)
    watched = _Python(own)
    seen = watched.bytes()
    return seen == watched.bytes() and _is_python_state(seen, python_state(own))


@cache
def _numpy_bytes_tell_all() -> bool:
    """Whether the bytes differ when half of a pair is drawn, and while nothing is drawn do not."""
    twister = np.random.MT19937(0)
    own = np.random.RandomState(twister)
    watched = _Numpy(own, twister)
    own.standard_normal()
    with_half = watched.bytes()
    unchanged = with_half == watched.bytes()
    own.standard_normal()
    without = watched.bytes()
    return unchanged and with_half[0] == without[0] and with_half[1] != without[1]
