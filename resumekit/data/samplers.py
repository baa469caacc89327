"""Drop-in samplers that start at any position of an epoch at once, however long it is."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from resumekit.errors import ConfigurationError


@runtime_checkable
class RandomAccess(Protocol):
    """A sampler that can begin an epoch at any position. A custom sampler may implement it."""

    def iterate_from(self, position: int) -> Iterator[int]:
        """This rank's indices from where all ranks together have used ``position`` samples."""
        ...

    def order_name(self) -> dict[str, Any]:
        """What names the epoch's order, in plain values: equal for equal orders."""
        ...


class ResumableSampler(Sampler[int]):
    """Every index once an epoch, in an order that seed, epoch and length name.

    A drop-in for ``RandomSampler`` and, with ``shuffle=False``, for ``SequentialSampler``. It draws
    from no generator and holds no permutation, so any position of an epoch is found at once.

    Args:
        data_source: what ``len()`` can be asked of.
        shuffle: False gives 0, 1, 2, ...
        seed: names the order, together with the epoch.
    """

    def __init__(self, data_source: Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        self.data_source = data_source
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch whose order the next iteration gives; the loops of resumekit call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """The epoch's indices from a position on."""
        order = draw(self.order_name())
        return share(order, len(order) - position, position=position)

    def order_name(self) -> dict[str, Any]:
        """What names the epoch's order, in plain values."""
        return name_of(len(self.data_source), self)


class DistributedResumableSampler(DistributedSampler[int]):
    """The part of one rank of the order that seed, epoch and length name.

    A drop-in for ``DistributedSampler``, of which it is a subclass. Ranks take turns, and
    what cannot be divided is padded or dropped as there. The order is that of ``ResumableSampler``
    with the same seed, whatever the number of ranks.

    Args:
        data_source: what ``len()`` can be asked of.
        num_replicas: the ranks that share it; by default all of the job.
        rank: this rank; by default the process's own.
        shuffle: False gives 0, 1, 2, ...
        seed: names the order, together with the epoch; the same on all ranks.
        drop_last: leave out the tail that cannot be divided, instead of padding it.

    Raises:
        ConfigurationError: neither given nor known how many ranks there are.
        ValueError: a rank outside of them.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None:
            num_replicas = _num_ranks()
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        super().__init__(
            data_source,  # type: ignore[arg-type]  # torch asks for its length alone
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """This rank's indices from where all ranks together have used ``position`` samples."""
        order, turn = draw(self.order_name()), {"num_replicas": self.num_replicas}
        num_mine = shard_length(len(order) - position, drop_last=self.drop_last, **turn)
        return share(order, num_mine, position=position, replica=self.rank, **turn)

    def order_name(self) -> dict[str, Any]:
        """What names the epoch's order, in plain values: the same on every rank."""
        return name_of(len(self.dataset), self)  # type: ignore[arg-type]


def name_of(length: int, sampler: Any) -> dict[str, Any]:
    """The name of the order that a sampler of this length gives in its epoch."""
    if not sampler.shuffle:
        return {"kind": "in order", "length": length}
    return {
        "kind": "keyed",
        "version": VERSION,
        "length": length,
        "seed": int(sampler.seed),
        "epoch": int(sampler.epoch),
    }


def draw(name: dict[str, Any]) -> EpochOrder:
    """The order of that name, with access to any position."""
    if name["kind"] == "in order":
        return InOrder(name["length"])
    return Permutation(name["length"], seed=name["seed"], epoch=name["epoch"])


def _num_ranks() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced > 1:
        raise ConfigurationError(
            "num_replicas",
            found=f"torch.distributed is not initialised, while WORLD_SIZE={announced}",
            expected="one process group over all ranks",
            remedy="Call init_process_group before the sampler is made, or give num_replicas, rank",
        )
    return 1


Positions = npt.NDArray[np.int64]


Numbers = npt.NDArray[np.uint64]


# Part of the name: another network is another permutation, and needs another number here.
VERSION = 1
# Few positions need more rounds until every order is as likely as any other.
_NUM_ROUNDS, _NUM_ROUNDS_SHORT, _SHORT = 8, 24, 1 << 16
_HALF = np.uint64(32)
# The mixing constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2 = np.uint64(30), np.uint64(27)
# Each digit must fit into 32 bits: its hash is scaled by a 64-bit product.
LONGEST = 2**62
# The indices that are computed at once: a few arrays of this length stay in a processor's cache.
CHUNK = 8192


class EpochOrder(Protocol):
    """The order of an epoch, read at any positions: ``order[positions]`` gives their indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: Any, /) -> Any: ...


class Permutation:
    """The permutation of [0, length) that seed and epoch name; ``permutation[positions]`` reads it.

    Args:
        length: the number of indices, below 2**62.
        seed: any whole number.
        epoch: any whole number; each one names another permutation.

    Raises:
        ConfigurationError: a negative or too large length.
    """

    def __init__(self, length: int, *, seed: int = 0, epoch: int = 0) -> None:
        if not 0 <= length < LONGEST:
            raise ConfigurationError("length", found=str(length), expected="0 to 2**62 - 1")
        self._length = length
        self._high = math.isqrt(max(length - 1, 0)) + 1  # the ceiling of the square root
        self._low = -(-length // self._high) if length else 1
        name = f"resumekit permutation {VERSION}: {length} {seed} {epoch}"
        num_rounds = _NUM_ROUNDS_SHORT if length < _SHORT else _NUM_ROUNDS
        self._keys = [_key(name, number) for number in range(num_rounds)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: Positions) -> Positions:
        """The indices at these positions, each in [0, length); positions are not checked."""
        numbers = self._once(np.asarray(positions, dtype=np.uint64).reshape(-1))
        outside = np.flatnonzero(numbers >= self._length)
        while outside.size:
            numbers[outside] = again = self._once(numbers[outside])
            outside = outside[again >= self._length]
        return numbers.astype(np.int64).reshape(np.shape(positions))

    def _once(self, numbers: Numbers) -> Numbers:
        """The network, once, over [0, high * low)."""
        low_size = np.uint64(self._low)
        high: Numbers = numbers // low_size
        low = numbers - high * low_size
        mixed, spare = np.empty_like(high), np.empty_like(high)
        for number, key in enumerate(self._keys):
            if number % 2:
                _add_hash(low, self._low, high, key, mixed, spare)
            else:
                _add_hash(high, self._high, low, key, mixed, spare)
        high *= low_size
        high += low
        return high


def _key(name: str, number: int) -> np.uint64:
    digest = hashlib.blake2b(f"{name} {number}".encode(), digest_size=8).digest()
    key: np.uint64 = np.uint64(int.from_bytes(digest, "little"))
    return key


def _add_hash(
    digit: Numbers,
    base: int,
    other: Numbers,
    key: np.uint64,
    mixed: Numbers,
    spare: Numbers,
) -> None:
    """Adds to one digit a hash of the other, modulo the digit's base; the last two are scratch."""
    np.bitwise_xor(other, key, out=mixed)
    np.right_shift(mixed, _SHIFT_1, out=spare)
    mixed ^= spare
    mixed *= _MIX_1
    np.right_shift(mixed, _SHIFT_2, out=spare)
    mixed ^= spare
    mixed *= _MIX_2
    mixed >>= _HALF
    mixed *= np.uint64(base)
    mixed >>= _HALF  # a number below the base, from the upper half of the hash
    digit += mixed
    np.subtract(digit, np.uint64(base), out=spare)
    np.minimum(digit, spare, out=digit)  # below the base, the difference wraps to a huge number


class InOrder:
    """0, 1, 2, ...: the order of a sampler that does not shuffle."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: Positions) -> Positions:
        return positions


def shard_length(num_left: int, *, num_replicas: int, drop_last: bool) -> int:
    """The samples of each rank when this many are sharded, as DistributedSampler counts."""
    return num_left // num_replicas if drop_last else -(-num_left // num_replicas)


def share(
    order: EpochOrder,
    num_mine: int,
    *,
    position: int = 0,
    num_replicas: int = 1,
    replica: int = 0,
    in_a_row: int = 1,
) -> Iterator[int]:
    """One rank's part of what is left of an epoch, by the rule of torch's DistributedSampler.

    The ranks take turns; with Accelerate's BatchSamplerShard, over whole batches. What is missing
    to the last round comes from the head of the epoch's order.

    Args:
        order: the order of the whole epoch.
        num_mine: the samples of this rank.
        position: the samples that all ranks together used before.
        num_replicas: the ranks that share it.
        replica: which of them this is.
        in_a_row: the samples that a rank takes at its turn.
    """
    length = len(order)
    for first in range(0, num_mine, CHUNK):
        numbers = np.arange(first, min(first + CHUNK, num_mine), dtype=np.int64)
        rounds, offsets = np.divmod(numbers, in_a_row)
        positions = position + (rounds * num_replicas + replica) * in_a_row + offsets
        yield from order[positions % length].tolist()
