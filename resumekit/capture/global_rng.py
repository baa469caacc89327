"""The state of the global generators: Python's, NumPy's, and those of an accelerator's devices.

Python's and NumPy's are read in full only after a change. ``random.getstate`` and
``np.random.get_state`` return 624 numbers one by one. The data order reads both at every batch that
it records; the journal at every tenth step, and at the first ten after a save or a resume. So the
memory of the state is compared with that of the last read first. One read of both generators takes,
each after a training step, which evicts the caches:

- nothing was drawn since the last read: 23.5 microseconds; 121 without the comparison;
- a number was drawn: 132 microseconds; 95 without the comparison.

Source: one run, with both variants interleaved, on a loaded machine.

The memory layout is verified: once on a new generator, and against the state at each full read.
Where either check fails, every read is a full one.

Devices are those of CUDA, XPU, MPS, or of an accelerator that a plug-in registers. A program names
them by index, so a state belongs to an index, whichever GPU is behind it. The current device is the
exception: a launcher gives each rank another one, and another launch may give a rank another one
again. The state of the device that was current is restored to the one that is current.
"""

from __future__ import annotations

import ctypes
import random
import struct
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from resumekit.errors import StateMismatchError

# random.Random: version 3, 624 words and a position; gauss_next is the second normal number of a
# pair, or None.
PYTHON_WORDS = struct.Struct("<625I")
# CPython 3.11 Modules/_randommodule.c: int index; uint32_t state[624];
_PYTHON_OBJECT = struct.Struct("<i2496s")
# numpy 2.4 random/src/mt19937/mt19937.h: uint32_t key[624]; int pos;
_NUMPY_TWISTER = struct.Struct("<2496si")
_OBJECT_HEADER_BYTES = 16  # the reference count and the type

# torch 2.13 CUDAGeneratorImpl.cpp, XPUGeneratorImpl.cpp get_state: eight bytes of seed, eight bytes
# of offset. A seed says nothing of use: that of a generator that was never seeded is random.
SEED_AND_OFFSET = struct.Struct("<QQ")


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


# ---------------------------------------------------------------- devices


class DeviceStates(NamedTuple):
    """The states of all devices of one type.

    Args:
        kind: the type of the devices: ``"cuda"``.
        current: the index of the current device; None in a checkpoint that does not name it.
        states: by index.
    """

    kind: str
    current: int | None
    states: list[torch.Tensor]

    def current_first(self) -> list[torch.Tensor]:
        """The states, those of the first and the current device exchanged."""
        order = range(len(self.states))
        return [self.states[_exchanged(index, self.current or 0)] for index in order]


def accelerator_in_use(*, if_unknown: bool) -> str:
    """The type of the accelerator that this process uses, as ``"cuda"``; empty where it uses none.

    Args:
        if_unknown: whether one that does not report its use, as MPS, is in use.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch 2.13
        return "cuda"
    device = torch.accelerator.current_accelerator()
    # Without a device, the type that torch was built for.
    if device is None or device.type == "cuda":
        return ""
    module: Any = getattr(torch, device.type, None)  # a plug-in may register none
    if hasattr(module, "is_initialized"):
        return device.type if module.is_initialized() else ""
    return device.type if if_unknown and torch.accelerator.is_available() else ""


def unreadable_accelerator() -> str:
    """The type of the accelerator in use, if its generators cannot be read and set; else empty."""
    kind = accelerator_in_use(if_unknown=True)
    return "" if _is_readable(getattr(torch, kind, None)) else kind


def read_devices() -> DeviceStates | None:
    """The states of the accelerator in use; None while there is none, or it has none to read.

    Reading the states before would create a context on every device.
    """
    kind = accelerator_in_use(if_unknown=True)
    module: Any = getattr(torch, kind, None) if kind else None  # torch takes long for no name
    if not _is_readable(module):
        return None
    states = [module.get_rng_state(index) for index in range(module.device_count())]
    return DeviceStates(kind, _current(module), states) if states else None


def restore_devices(saved: DeviceStates) -> list[str]:
    """Sets the generators of all devices that have a saved state, and reads them again.

    Returns:
        A message about draws that may differ; none where they continue.

    Raises:
        StateMismatchError: a generator has another state after it was set.
    """
    if not saved.states:
        kind = accelerator_in_use(if_unknown=False)
        message = f"the checkpoint has no RNG state of {kind} devices: draws on them"
        return [f"{message} start from the script's seed"] if kind else []
    targets = [
        set_device_state(saved.kind, index, saved.current, state)
        for index, state in enumerate(saved.states)
    ]
    moved = saved.current is not None and targets[saved.current] != saved.current
    doubtful = [
        f"{saved.kind}:{index}"
        for index, (state, target) in enumerate(zip(saved.states, targets, strict=True))
        if was_drawn_from(state) and (target is None or (moved and index != saved.current))
    ]
    if not doubtful:
        return []
    then = (
        "" if saved.current is None else f", and {saved.kind}:{saved.current} was the current one"
    )
    return [
        f"draws may differ on {', '.join(doubtful)}: the checkpoint has the RNG states of "
        f"{len(saved.states)} {saved.kind} devices{then}; here are {_num_devices(saved.kind)}"
    ]


def set_device_state(kind: str, index: int, then: int | None, state: torch.Tensor) -> int | None:
    """Sets the generator of the device that continues a saved one.

    Args:
        kind: the type of the device.
        index: of the device whose state was saved.
        then: the index of the current device at the save; None where it is unknown.
        state: of the generator.

    Returns:
        The index of the device; None where there is no such device.

    Raises:
        StateMismatchError: the generator has another state after it was set.
    """
    num_devices = _num_devices(kind)
    if not num_devices:
        return None
    module: Any = torch.get_device_module(kind)
    if not _is_readable(module):
        return None
    # torch 2.13 cuda/__init__.py _lazy_init: seeds that manual_seed has queued are set after the
    # states that set_rng_state has queued, so a state set before the start of CUDA would be lost.
    start = getattr(module, "init", None)
    if start is not None:
        start()
    device = device_for(index, then, _current(module))
    if device >= num_devices:
        return None
    module.set_rng_state(state, device)
    if not torch.equal(module.get_rng_state(device), state):
        raise StateMismatchError(
            f"rng: {kind}:{device}",
            found="another state of the generator after it was set",
            expected="the checkpoint's",
        )
    return device


def device_for(index: int, then: int | None, now: int) -> int:
    """The index of the device that continues a saved one; of the current one the current one.

    Args:
        index: of the device whose state was saved.
        then: the index of the current device at the save; None: the same as now.
        now: the index of the current device.
    """
    return index if then is None else _exchanged(_exchanged(index, then), now)


def was_drawn_from(state: torch.Tensor) -> bool:
    """Whether numbers were drawn since the generator was seeded; True where nothing shows it."""
    if state.numel() != SEED_AND_OFFSET.size:
        return True
    _, offset = SEED_AND_OFFSET.unpack(state.numpy().tobytes())
    return bool(offset)


def _exchanged(index: int, current: int) -> int:
    """The index, with 0 and that of the current device exchanged."""
    if index == 0:
        return current
    return 0 if index == current else index


def _current(module: Any) -> int:
    return int(module.current_device()) if hasattr(module, "current_device") else 0  # MPS has one


def _is_readable(module: Any) -> bool:
    return hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")


def _num_devices(kind: str) -> int:
    try:
        return int(torch.get_device_module(kind).device_count())
    except RuntimeError:  # torch knows no such type here, or no module of it was imported
        return 0
