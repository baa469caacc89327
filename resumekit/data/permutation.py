"""A permutation of [0, n) that is known by its name alone, and read at any place.

A generalised Feistel network: a number below ``a * b`` is a pair of digits, and each round adds to
one digit a keyed hash of the other. Whatever the hash, each round can be undone, so the whole is a
bijection of [0, a * b). Where it leaves [0, n), it is applied again until it comes back in ("cycle
walking"), which is rare, because ``a * b`` is at most ``sqrt(n)`` larger than ``n``.

Only whole-number arithmetic modulo 2**64 is used: the order is the same on every machine and in
every version of NumPy. Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains",
CT-RSA 2002.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from resumekit.errors import ConfigurationError

Positions = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]

# Part of the name: another network is another permutation, and needs another number here.
VERSION = 1

# Few places need more rounds until every order is as likely as any other.
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
    """The order of an epoch, read at any places: ``order[positions]`` gives their indices."""

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


def share_length(num_left: int, *, num_replicas: int, drop_last: bool) -> int:
    """The samples of each rank when this many are shared out, as DistributedSampler counts."""
    return num_left // num_replicas if drop_last else -(-num_left // num_replicas)


def share(
    order: EpochOrder,
    *,
    position: int = 0,
    num_replicas: int = 1,
    replica: int = 0,
    drop_last: bool = False,
) -> Iterator[int]:
    """One rank's part of what is left of an epoch, by the rule of torch's DistributedSampler.

    The ranks take turns. If what is left cannot be divided, the ranks that come short take samples
    from the head of the epoch's order, or with ``drop_last`` the tail is left out.

    Args:
        order: the order of the whole epoch.
        position: the samples that all ranks together used before.
        num_replicas: the ranks that share it.
        replica: which of them this is.
        drop_last: leave out the tail.
    """
    length = len(order)
    num_mine = share_length(
        max(length - position, 0), num_replicas=num_replicas, drop_last=drop_last
    )
    for first in range(0, num_mine, CHUNK):
        turns = np.arange(first, min(first + CHUNK, num_mine), dtype=np.int64)
        places = position + replica + turns * num_replicas
        places[places >= length] %= length
        yield from order[places].tolist()


def share_in_batches(
    order: EpochOrder,
    *,
    position: int,
    batch_size: int,
    num_batches: int,
    num_replicas: int,
    replica: int,
) -> Iterator[int]:
    """One rank's part of what is left of an epoch, where the ranks take turns over whole batches.

    What is missing to the last full batches comes from the head of the epoch's order, by the rule
    of Accelerate's BatchSamplerShard.

    Args:
        order: the order of the whole epoch.
        position: the samples that all ranks together used before.
        batch_size: the samples of a batch of one rank.
        num_batches: how many this rank has left.
        num_replicas: the ranks that share it.
        replica: which of them this is.
    """
    length = len(order)
    for number in range(num_batches):
        first = position + (number * num_replicas + replica) * batch_size
        places = np.arange(first, first + batch_size, dtype=np.int64)
        yield from order[places % length].tolist()
