"""The global RNG states of a process as bytes: read, written, and recorded at each fetch."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np
import torch

from resumekit.capture import (
    PYTHON_WORDS,
    NumpyState,
    PythonState,
    read_devices,
    set_device_state,
)

# random.Random: 624 words and a position, then half of a pair of normal numbers, if there is one.
_PYTHON = struct.Struct("<2500s?d")
_PYTHON_VERSION = 3
# The twister's key, then its position, and half of a pair of normal numbers, if there is one.
_NUMPY = struct.Struct("<2496sqqd")
_TWISTER = "MT19937"
# A device, and the index of the current device, which older checkpoints do not have: "cuda:1@1".
_DEVICE = re.compile(r"(\w+):(\d+)(?:@(\d+))?", re.ASCII)


class StateReader:
    """Reads the state of each global generator of this process; draws nothing."""

    def __init__(self) -> None:
        self._python, self._numpy = PythonState(), NumpyState()
        self._read: tuple[Any, Any] = (None, None)  # of Python and NumPy, as read last
        self._host: dict[str, bytes] = {}  # the same as bytes
        self._torch = b""

    def read(self, *, devices: bool = True) -> dict[str, bytes]:
        """The states, by name; of a generator that drew nothing the same object as before.

        Args:
            devices: whether those of an accelerator are among them, once it is in use.
        """
        python, numpy = self._python.read(), self._numpy.read()
        if python is not self._read[0]:
            self._host["python"] = _pack_python(python)
        if numpy is not self._read[1]:
            self._host.pop("numpy", None)
            if numpy["bit_generator"] == _TWISTER:  # a user may have replaced it
                self._host["numpy"] = _pack_numpy(numpy)
        self._read = (python, numpy)
        state = torch.default_generator.get_state().numpy().tobytes()
        if state != self._torch:
            self._torch = state
        states = {**self._host, "torch": self._torch}
        found = read_devices() if devices else None
        if found is not None:
            for index, each in enumerate(found.states):
                states[f"{found.kind}:{index}@{found.current}"] = each.numpy().tobytes()
        return states


def read_states(*, devices: bool = True) -> dict[str, bytes]:
    """The state of each global generator of this process, by name; see ``StateReader.read``."""
    return StateReader().read(devices=devices)


def write_states(states: Mapping[str, bytes]) -> None:
    """Sets the generators that are named; leaves the others as they are.

    The states of devices that are not here are left out: the component ``rng`` reports them.
    """
    for name, state in states.items():
        if name == "python":
            words, has_half, half = _PYTHON.unpack(state)
            half = half if has_half else None
            random.setstate((_PYTHON_VERSION, PYTHON_WORDS.unpack(words), half))
        elif name == "numpy":
            key, *rest = _NUMPY.unpack(state)
            np.random.set_state((_TWISTER, np.frombuffer(key, dtype=np.uint32).copy(), *rest))
        elif name == "torch":
            torch.default_generator.set_state(_tensor(state))
        elif device := _DEVICE.fullmatch(name):
            kind, index, then = device.groups()
            set_device_state(kind, int(index), int(then) if then else None, _tensor(state))


def _pack_python(state: Mapping[str, Any]) -> bytes:
    half = state["gauss_next"]
    return _PYTHON.pack(state["words"], half is not None, half or 0.0)


def _pack_numpy(state: Mapping[str, Any]) -> bytes:
    inner = state["state"]
    return _NUMPY.pack(inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


# 5 KB for each batch and generator: enough for an epoch of 13,000 batches.
MAX_BYTES = 64 * 1024 * 1024


class _Records:
    """The states of one generator, in two arrays that grow; what was read of them stays as it is.

    A prefetching loader takes the state of its position before every fetch and keeps it. Each is a
    view of these arrays, so an epoch of many records costs no copies.
    """

    def __init__(self) -> None:
        self._num = 0
        self._batches = np.empty(0, dtype=np.int64)
        self._states = np.empty((0, 0), dtype=np.uint8)

    def add(self, number: int, state: bytes) -> None:
        if self._num == len(self._batches):
            capacity = max(16, 2 * self._num)
            self._batches = np.resize(self._batches, capacity)
            self._states = np.resize(self._states, (capacity, len(state)))
        self._batches[self._num] = number
        self._states[self._num] = np.frombuffer(state, dtype=np.uint8)
        self._num += 1

    def as_arrays(self) -> dict[str, Any]:
        return {"batches": self._batches[: self._num], "states": self._states[: self._num]}


class FetchRecorder:
    """Records the RNG state that a fetch draws from, and sets it when the epoch is fetched again.

    A state is recorded only where drawing again would not lead to it.

    Attributes:
        overflowed: whose states took more than ``MAX_BYTES``; empty while they do not. The records
            of this epoch are then given up.
    """

    def __init__(self) -> None:
        self.overflowed = ""
        self._reader = StateReader()
        self._records: dict[str, _Records] = {}
        self._played: dict[int, dict[str, bytes]] = {}  # states of the interrupted run, by fetch
        self._reached: dict[str, bytes] = {}  # where drawing again would be now
        self._before: dict[str, bytes] = {}
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether drawing again leads to every batch of this epoch so far."""
        return not (self._records or self.overflowed)

    def begin(self, recorded: Mapping[str, Any] | None = None) -> None:
        """The epoch's iterator was just made.

        Args:
            recorded: what ``state_dict`` gave in the interrupted epoch, to fetch the same again.
        """
        self.overflowed, self._num_bytes = "", 0
        self._records, self._played = {}, {}
        for name, records in (recorded or {}).items():
            for number, state in zip(records["batches"].tolist(), records["states"], strict=True):
                self._played.setdefault(number, {})[name] = state.tobytes()
        self._reached = self._reader.read()

    def before(self, number: int) -> None:
        """The batch of this number in the epoch is about to be fetched."""
        if self._played:
            write_states(self._played.pop(number, {}))
        self._before = self._reader.read()

    def after(self, number: int) -> None:
        """It was fetched."""
        for name, state in self._reader.read().items():
            before = self._before.get(name)
            if state == before:
                continue
            if before is not None and before != self._reached.get(name):
                self._record(name, number, before)
            self._reached[name] = state

    def fetches(self, items: Iterator[Any], first: int = 0) -> Iterator[Any]:
        """The items of an iterator, each of them a fetch; the first one has this number."""
        for number in count(first):
            self.before(number)
            try:
                item = next(items)
            except StopIteration:
                return
            self.after(number)
            yield item

    def _record(self, name: str, number: int, state: bytes) -> None:
        if self.overflowed:
            return
        self._num_bytes += len(state)
        if self._num_bytes > MAX_BYTES:
            self.overflowed = name
            self._records = {}
            return
        self._records.setdefault(name, _Records()).add(number, state)

    def state_dict(self) -> dict[str, Any]:
        """The recorded states, one array for each generator; they are not to be changed."""
        return {name: records.as_arrays() for name, records in self._records.items()}
