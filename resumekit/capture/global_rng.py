"""The state of Python's and NumPy's global generators, read in full only after a change.

``random.getstate`` and ``np.random.get_state`` return 624 numbers one by one. The data order reads
both at every batch that it records; the journal at every tenth step, and at the first ten after a
save or a resume. So the memory of the state is compared with that of the last read first. One read
of both generators takes, each after a training step, which evicts the caches:

- nothing was drawn since the last read: 23.5 microseconds; 121 without the comparison;
- a number was drawn: 132 microseconds; 95 without the comparison.

Source: one run, with both variants interleaved, on a loaded machine.

The memory layout is verified: once on a new generator, and against the state at each full read.
Where either check fails, every read is a full one.
"""

from __future__ import annotations

import ctypes
import random
import struct
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import numpy as np

# random.Random: version 3, 624 words and a position; gauss_next is the second normal number of a
# pair, or None.
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
        self._is_comparable = self._is_layout_known()
        self._seen: tuple[Any, ...] | None = None
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The state in plain values; must not be changed, the next read may return the object."""
        seen = self._bytes() if self._is_comparable else None
        if seen is None or seen != self._seen:
            self._state = self._in_full()
            if seen is not None:
                self._is_comparable = self._agrees(seen)
            self._seen = seen if self._is_comparable else None
        return self._state

    @abstractmethod
    def _is_layout_known(self) -> bool:
        """Whether the bytes of a new generator contain its whole state."""

    @abstractmethod
    def _bytes(self) -> tuple[Any, ...] | None:
        """The memory of the state; None where the user has installed another type of generator."""

    @abstractmethod
    def _in_full(self) -> dict[str, Any]:
        """The state, read from the library."""

    @abstractmethod
    def _agrees(self, seen: tuple[Any, ...]) -> bool:
        """Whether these bytes contain the state that was just read."""


class PythonState(_GlobalState):
    """Reads the state of the module ``random``: its ``Random`` object and ``gauss_next``."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: _Python | None = None

    def _is_layout_known(self) -> bool:
        return _is_python_layout_known()

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
    """Reads the state of ``np.random``: its MT19937 and the RandomState with the cached normal."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: _Numpy | None = None

    def _is_layout_known(self) -> bool:
        return _is_numpy_layout_known()

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
    """The memory of a ``random.Random``."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner  # the reference keeps the memory valid
        self._object = _memory_of(owner)

    def bytes(self) -> tuple[bytes, Any]:
        return self._object.raw, self.owner.gauss_next


class _Numpy:
    """The memory of a RandomState and of its MT19937."""

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
def _is_python_layout_known() -> bool:
    """Whether the bytes contain the state, and do not change without a draw."""
    generator = random.Random(0)
    generator.gauss(0.0, 1.0)
    watched = _Python(generator)
    seen = watched.bytes()
    return seen == watched.bytes() and _is_python_state(seen, python_state(generator))


@cache
def _is_numpy_layout_known() -> bool:
    """Whether the bytes show a cached normal number, and do not change without a draw."""
    twister = np.random.MT19937(0)
    generator = np.random.RandomState(twister)
    watched = _Numpy(generator, twister)
    generator.standard_normal()
    with_cached = watched.bytes()
    is_stable = with_cached == watched.bytes()
    generator.standard_normal()
    without = watched.bytes()
    return is_stable and with_cached[0] == without[0] and with_cached[1] != without[1]
