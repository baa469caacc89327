"""The random state of the global generators as flat bytes, quick to compare and to ship."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch

# random.Random: 624 words and a position, then half of a pair of normal numbers, if there is one.
_PYTHON = struct.Struct("<625I?d")
_PYTHON_VERSION = 3
# np.random's Mersenne Twister: its key, then position, and the same half of a pair.
_NUMPY = struct.Struct("<2496sqqd")
_CUDA = "cuda:"


def read_states(*, devices: bool = True) -> dict[str, bytes]:
    """The state of each global generator of this process, by name; draws nothing.

    Args:
        devices: whether the CUDA devices' are among them, once CUDA is in use.
    """
    _, words, half = random.getstate()
    states = {"python": _PYTHON.pack(*words, half is not None, half or 0.0)}
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":  # a user may have put another in its place
        inner = numpy["state"]
        states["numpy"] = _NUMPY.pack(
            np.asarray(inner["key"]).tobytes(), inner["pos"], numpy["has_gauss"], numpy["gauss"]
        )
    states["torch"] = torch.default_generator.get_state().numpy().tobytes()
    if devices and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch 2.13
        for index, generator in enumerate(torch.cuda.default_generators):
            states[f"{_CUDA}{index}"] = generator.get_state().numpy().tobytes()
    return states


def write_states(states: Mapping[str, bytes]) -> None:
    """Sets the generators that are named; leaves the others as they are."""
    for name, state in states.items():
        if name == "python":
            *words, has_half, half = _PYTHON.unpack(state)
            random.setstate((_PYTHON_VERSION, tuple(words), half if has_half else None))
        elif name == "numpy":
            key, *rest = _NUMPY.unpack(state)
            np.random.set_state(("MT19937", np.frombuffer(key, dtype=np.uint32).copy(), *rest))
        elif name == "torch":
            torch.default_generator.set_state(_tensor(state))
        else:
            torch.cuda.set_rng_state(_tensor(state), int(name.removeprefix(_CUDA)))


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
