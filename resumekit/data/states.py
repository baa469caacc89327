"""The random state of the global generators as flat bytes, quick to compare and to ship."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from resumekit.capture import PYTHON_WORDS, NumpyState, PythonState

# random.Random: 624 words and a position, then half of a pair of normal numbers, if there is one.
_PYTHON = struct.Struct("<2500s?d")
_PYTHON_VERSION = 3
# The twister's key, then its position, and half of a pair of normal numbers, if there is one.
_NUMPY = struct.Struct("<2496sqqd")
_TWISTER = "MT19937"
_CUDA = "cuda:"


class StateReader:
    """Reads the state of each global generator of this process; draws nothing."""

    def __init__(self) -> None:
        self._python, self._numpy = PythonState(), NumpyState()

    def read(self, *, devices: bool = True) -> dict[str, bytes]:
        """The states, by name.

        Args:
            devices: whether the CUDA devices' are among them, once CUDA is in use.
        """
        python, numpy = self._python.read(), self._numpy.read()
        half = python["gauss_next"]
        states = {"python": _PYTHON.pack(python["words"], half is not None, half or 0.0)}
        if numpy["bit_generator"] == _TWISTER:  # a user may have put another in its place
            states["numpy"] = _pack_numpy(numpy)
        states["torch"] = torch.default_generator.get_state().numpy().tobytes()
        if devices and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch 2.13
            for index, generator in enumerate(torch.cuda.default_generators):
                states[f"{_CUDA}{index}"] = generator.get_state().numpy().tobytes()
        return states


def read_states(*, devices: bool = True) -> dict[str, bytes]:
    """The same, once."""
    return StateReader().read(devices=devices)


def write_states(states: Mapping[str, bytes]) -> None:
    """Sets the generators that are named; leaves the others as they are."""
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
        else:
            torch.cuda.set_rng_state(_tensor(state), int(name.removeprefix(_CUDA)))


def _pack_numpy(state: Mapping[str, Any]) -> bytes:
    inner = state["state"]
    return _NUMPY.pack(inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
