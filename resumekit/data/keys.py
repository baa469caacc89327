"""Keys of random numbers: what is drawn after a key depends on it, and on nothing drawn before.

A sample's key is made from the run's seed, the loader's name, the epoch and the sample's index. In
which process it is made, after which other samples and on which rank makes no difference.
"""

from __future__ import annotations

import hashlib
import operator
import random
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from resumekit.capture import require_fields
from resumekit.data.epoch_order import OrderDigest
from resumekit.data.samplers import DistributedResumableSampler, ResumableSampler
from resumekit.errors import DriftError, UnsupportedValueError
from resumekit.state import ComponentState

# The component that holds the seed; only a checkpoint of a keyed run has it.
SEED = "data/seed"
# 128 bits for Python, 32 for NumPy, 64 for torch, whose generator for the CPU uses 32 of them.
# Words of their own: all three are Mersenne Twisters, and equal seeds would give equal numbers.
_SEEDS = struct.Struct("<16sIQ")


class Purpose(str, Enum):
    """What a key is for; two purposes never share one."""

    SAMPLE = "sample"
    BATCH = "batch"  # the samples of a dataset that gives a whole batch at once
    COLLATE = "collate"
    WORKERS = "workers"


class RunSeed(ComponentState):
    """The seed of all keys of a run, a component of its state: taken once, at the first start.

    Args:
        generators: private generators that the user named; a checkpoint holds their state.
    """

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self.value: int | None = None
        self.saved_generators = tuple(generators)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.value}

    def check_state_dict(self, state: Any) -> None:
        require_fields(SEED, state, {"seed": int})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["seed"]


def check_randomness(saved: Collection[str], randomness: str) -> None:
    """Returns when a checkpoint was written in this mode.

    Args:
        saved: the keys of its components.
        randomness: this run's mode.

    Raises:
        DriftError: it was written in the other one, in which samples draw other numbers.
    """
    then = "keyed" if SEED in saved else "tape"
    if then != randomness:
        raise DriftError(
            "randomness",
            found=repr(randomness),
            expected=f"{then!r}, as in the checkpoint",
            remedy=f"Pass randomness={then!r}, or start a new run in an empty directory",
        )


@dataclass(frozen=True)
class Keys:
    """The keys of one loader.

    Args:
        seed: the run's.
        loader: the loader's name, so that no two draw the same numbers.
    """

    seed: int
    loader: str

    def hasher(self, purpose: Purpose, epoch: int) -> Any:
        """A hash object: ``update()`` takes the content of a key, ``digest()`` gives the key."""
        # blake2b: its definition will not change, and it is in every Python.
        subject = index_bytes((self.seed, self.loader, purpose.value, epoch))
        return hashlib.blake2b(subject, digest_size=_SEEDS.size, person=b"resumekit keys 1")

    def key(self, purpose: Purpose, epoch: int, content: bytes = b"") -> bytes:
        """One key."""
        hasher = self.hasher(purpose, epoch)
        hasher.update(content)
        return bytes(hasher.digest())

    def generator(self, purpose: Purpose, epoch: int) -> torch.Generator:
        """A new generator that a key seeded."""
        *_, seed = _SEEDS.unpack(self.key(purpose, epoch))
        return torch.Generator().manual_seed(seed)


def seed_generators(key: bytes) -> None:
    """Seeds Python's, NumPy's and torch's global generators of the CPU from a key."""
    for_python, for_numpy, for_torch = _SEEDS.unpack(key)
    random.seed(int.from_bytes(for_python, "little"))
    np.random.seed(for_numpy)
    # Not torch.manual_seed: it reseeds every device, which takes a hundred times as long.
    torch.default_generator.manual_seed(for_torch)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Puts the three global generators back, whatever was drawn or seeded inside."""
    for_python, for_numpy = random.getstate(), np.random.get_state(legacy=True)
    for_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(for_python)
        np.random.set_state(for_numpy)
        torch.default_generator.set_state(for_torch)


def index_bytes(index: Any) -> bytes:
    """A sample's index as bytes: the same in every process, and no two indices alike.

    Raises:
        UnsupportedValueError: an object that is only itself, for which there is no such text.
    """
    if type(index) is int:  # the most frequent one
        return b"%d," % index
    for kind, encode in _ENCODINGS:
        if isinstance(index, kind):
            return encode(index)
    if hasattr(index, "tolist"):  # NumPy's and torch's numbers and arrays
        return index_bytes(index.tolist())
    try:
        return index_bytes(operator.index(index))
    except TypeError:
        raise UnsupportedValueError(
            "randomness='keyed'",
            found=f"a sampler that gives a {type(index).__name__} as the index of a sample",
            expected="numbers, strings, or lists, tuples and dicts of them",
        ) from None


_ENCODINGS: tuple[tuple[Any, Callable[[Any], bytes]], ...] = (
    (str, lambda text: b"s" + index_bytes(text.encode("utf-8", "surrogatepass"))),
    (bytes, lambda data: b"%d:%b" % (len(data), data)),
    ((tuple, list), lambda items: b"(%b)" % b"".join(map(index_bytes, items))),
    (Mapping, lambda mapping: b"m" + index_bytes(list(mapping.items()))),
    (slice, lambda part: b"l" + index_bytes((part.start, part.stop, part.step))),
    (float, lambda number: b"f" + index_bytes(float(number).hex())),
    (type(None), lambda _: b"n"),
)
_ONCE = (
    SequentialSampler,
    DistributedSampler,  # what it pads with goes to another rank than before
    ResumableSampler,
    DistributedResumableSampler,
)


def yields_each_index_once(loader: DataLoader[Any]) -> bool:
    """Whether an index cannot occur twice in an epoch of a rank; False for custom samplers."""
    batching: Any = loader.batch_sampler
    if type(batching) not in (BatchSampler, type(None)):
        return False
    sampler = loader.sampler if batching is None else batching.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in _ONCE


class Repeats:
    """Counts the indices of one epoch on this rank.

    Args:
        num_samples: the length of the dataset, 0 where it has none.
    """

    def __init__(self, num_samples: int) -> None:
        self._seen = bytearray(num_samples)  # a dict of all of them would outgrow the permutation
        self._times: dict[bytes, int] = {}

    def count(self, indices: Iterable[Any]) -> dict[int, int]:
        """By position, how often an index came before, for those that did."""
        counted = {position: self._count(index) for position, index in enumerate(indices)}
        return {position: times for position, times in counted.items() if times}

    def _count(self, index: Any) -> int:
        first = 0
        try:
            if not self._seen[index]:
                self._seen[index] = 1
                return 0
            first = 1
        except (TypeError, IndexError):
            pass  # an index that is no number below the length
        content = index_bytes(index)
        times = self._times.get(content, first)
        self._times[content] = times + 1
        return times


class CountingDigest(OrderDigest):
    """A digest of an order that also counts the indices added to it.

    Args:
        order: the digest.
        repeats: counts them.
    """

    def __init__(self, order: OrderDigest, repeats: Repeats) -> None:
        super().__init__(order.digest, order.packed)
        self._repeats = repeats

    def add(self, indices: Any) -> bytes | None:
        self._repeats.count(indices)
        return super().add(indices)
