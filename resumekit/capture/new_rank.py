"""The random state of a rank that did not exist when the checkpoint was written.

It must be the same each time, and another one than that of every other rank, or the ranks would
draw the same numbers. But where all former ranks were in one and the same state, they drew the same
numbers on purpose, or for want of one, as in a script that seeds all ranks alike; then a new rank
does so too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from resumekit.capture.generator import generator_state

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

# torch 2.13 CUDAGeneratorImpl.cpp get_state: eight bytes of seed, eight bytes of offset.
_CUDA_STATE_BYTES = 16
_SEED_BYTES = 8


def states_of_new_rank(
    states: Mapping[int, Mapping[str, Any]], rank: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The states of a new rank's generators, and the names of those that were derived.

    Args:
        states: of some former ranks, rank 0 among them: generators' states by name.
        rank: the new rank.
    """
    first = states[0]
    alike = {
        name: len(states) > 1 and all(_same(state, each.get(name)) for each in states.values())
        for name, state in first.items()
    }
    derived = {
        name: state if alike[name] else _derived(state, f"{name} of rank {rank}")
        for name, state in first.items()
    }
    return derived, tuple(name for name, is_alike in alike.items() if not is_alike)


def _derived(state: Any, name: str) -> Any:
    """Another state of the same kind of generator, which this state and the name decide."""
    if isinstance(state, list):  # one for each device
        return [_derived(each, f"{name}, device {index}") for index, each in enumerate(state)]
    digest = hashlib.blake2b(name.encode(), digest_size=_SEED_BYTES)
    _feed(digest, state)
    seed = int.from_bytes(digest.digest(), "little")
    if isinstance(state, torch.Tensor):
        return _torch_state(state, seed)
    if "words" in state:
        return _python_state(state, seed)
    return _numpy_state(state, seed)


def _torch_state(state: torch.Tensor, seed: int) -> torch.Tensor:
    if state.numel() != _CUDA_STATE_BYTES:
        return torch.Generator().manual_seed(seed).get_state()
    seed_bytes = bytearray(seed.to_bytes(_SEED_BYTES, "little"))
    return torch.cat([torch.frombuffer(seed_bytes, dtype=torch.uint8), state[_SEED_BYTES:]])


def _python_state(state: Mapping[str, Any], seed: int) -> dict[str, Any]:
    seeded: dict[str, Any] = generator_state(random.Random(seed))
    return seeded if seeded["version"] == state["version"] else dict(state)


def _numpy_state(state: Mapping[str, Any], seed: int) -> dict[str, Any]:
    kind = state.get("bit_generator")
    if kind not in _BIT_GENERATORS:
        return dict(state)
    bits = getattr(np.random, kind)(seed)
    is_legacy = "has_gauss" in state and "seed_sequence" not in state
    generator = np.random.RandomState(bits) if is_legacy else np.random.Generator(bits)
    seeded: dict[str, Any] = generator_state(generator)
    # None: what spawn() gives is the live generator's own.
    return seeded if is_legacy else {**seeded, "seed_sequence": None}


def _feed(digest: Any, value: Any) -> None:
    """Takes every bit of a state into a digest."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            digest.update(f"{key}:".encode())
            _feed(digest, each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _feed(digest, each)
    elif isinstance(value, torch.Tensor):
        digest.update(value.numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    else:
        digest.update(value if isinstance(value, bytes) else repr(value).encode())


def _same(first: Any, second: Any) -> bool:
    digests = [hashlib.blake2b(), hashlib.blake2b()]
    for digest, value in zip(digests, (first, second), strict=True):
        _feed(digest, value)
    return digests[0].digest() == digests[1].digest()
