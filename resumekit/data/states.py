"""The random state of the global generators as flat bytes, quick to compare and to ship."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch

from resumekit.data.numpy_state import PACKED, NumpyState

# random.Random: 624 words and a position, then half of a pair of normal numbers, if there is one.
_PYTHON = struct.Struct("<625I?d")
_PYTHON_VERSION = 3
_CUDA = "cuda:"


class StateReader:
    """Reads the state of each global generator of this process; draws nothing."""

    def __init__(self) -> None:
        self._numpy = NumpyState()

    def read(self, *, devices: bool = True) -> dict[str, bytes]:
        """The states, by name.

        Args:
            devices: whether the CUDA devices' are among them, once CUDA is in use.
        """
        _, words, half = random.getstate()
        states = {"python": _PYTHON.pack(*words, half is not None, half or 0.0)}
        numpy = self._numpy.read()
        if numpy is not None:  # a user may have put another in its place
            states["numpy"] = numpy
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
            *words, has_half, half = _PYTHON.unpack(state)
            random.setstate((_PYTHON_VERSION, tuple(words), half if has_half else None))
        elif name == "numpy":
            key, *rest = PACKED.unpack(state)
            np.random.set_state(("MT19937", np.frombuffer(key, dtype=np.uint32).copy(), *rest))
        elif name == "torch":
            torch.default_generator.set_state(_tensor(state))
        else:
            torch.cuda.set_rng_state(_tensor(state), int(name.removeprefix(_CUDA)))


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
