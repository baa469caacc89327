"""The order of an epoch: samplers that name it, how a loader divides it, and redrawing it."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from resumekit.data.loader_traits import (
    is_seeded_by_epoch,
    known_length,
    shards_whole_batches,
)
from resumekit.errors import ConfigurationError, DataPositionError


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


# ---------------------------------------------------------------- how a loader divides an order

# A sampler whose order no other process can draw. Under the other kinds, everything that an order
# depends on stands in its name or, for "drawn", in the RNG state at the epoch's start.
UNKNOWN = "unknown"
IN_ORDER, SEEDED, DRAWN, KEYED = "in order", "seeded", "drawn", "keyed"
SEEDED_BY_EPOCH = "seeded by epoch"
NAMED = frozenset({IN_ORDER, SEEDED, SEEDED_BY_EPOCH, DRAWN, KEYED})
# They draw their order when an epoch begins, or from a generator of their own.
_DRAW_AT_START = {
    each.__iter__
    for each in (
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )
}


@dataclass(frozen=True)
class Batching:
    """How a map-style loader takes an order apart: which part is this rank's, how many in a batch.

    Args:
        sampler: what gives single indices; None behind a custom batch sampler.
        batch_sampler: torch's own; None for a loader that does not collate.
        num_replicas: the ranks that share the order; 1 when each goes through all of it.
        replica: which of them this is.
        hidden_in: the class of a batch sampler that cannot be seen into.
        by_batches: the ranks take turns over whole batches, not over samples.
    """

    sampler: Any
    batch_sampler: BatchSampler | None
    num_replicas: int = 1
    replica: int = 0
    hidden_in: str = ""
    by_batches: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Batching:
        """How this loader does it."""
        given: Any = loader.batch_sampler
        if given is None:
            return cls(loader.sampler, None, *_replicas(loader.sampler))
        if shards_whole_batches(given):
            inner = given.batch_sampler
            if type(inner) is BatchSampler and _replicas(inner.sampler) == (1, 0):
                turn = given.num_processes, given.process_index
                return cls(inner.sampler, inner, *turn, by_batches=True)
        if type(given) is not BatchSampler:
            return cls(None, None, hidden_in=type(given).__name__)
        return cls(given.sampler, given, *_replicas(given.sampler))

    @cached_property
    def has_random_access(self) -> bool:
        """Whether an epoch can be begun at any position without drawing its order."""
        is_there = self.sampler is not None and not self.by_batches
        return is_there and isinstance(self.sampler, RandomAccess)

    @property
    def batch_size(self) -> int:
        """The samples in a full batch."""
        return 1 if self.batch_sampler is None else self.batch_sampler.batch_size

    @property
    def samples_per_rank(self) -> int | None:
        """The samples of one epoch on this rank, or None where the sampler does not say."""
        return None if self.by_batches else known_length(self.sampler)

    def num_batches(self, num_samples: int) -> int:
        """The batches that are made of this many samples of one rank."""
        if self.batch_sampler is not None and self.batch_sampler.drop_last:
            return num_samples // self.batch_size
        return -(-num_samples // self.batch_size)

    @property
    def in_a_row(self) -> int:
        """The samples that a rank takes before it is the next one's turn."""
        return self.batch_size if self.by_batches else 1

    def num_mine(self, num_left: int) -> int:
        """The samples of each rank when this many are sharded."""
        divides: Any = self.batch_sampler if self.by_batches else self.sampler
        return self.in_a_row * shard_length(
            self.num_batches(num_left) if self.by_batches else num_left,
            num_replicas=self.num_replicas,
            drop_last=getattr(divides, "drop_last", False),
        )

    def share(self, order: EpochOrder, position: int) -> Iterator[int]:
        """This rank's part of what is left of an order."""
        return share(
            order,
            self.num_mine(max(len(order) - position, 0)),
            position=position,
            num_replicas=self.num_replicas,
            replica=self.replica,
            in_a_row=self.in_a_row,
        )

    def in_batches(self, indices: Iterator[int]) -> Iterator[Any]:
        """The indices in batches as the loader makes them, or one by one if it does not."""
        if self.batch_sampler is None:
            return indices
        return iter(BatchSampler(indices, self.batch_size, self.batch_sampler.drop_last))


def _replicas(sampler: Any) -> tuple[int, int]:
    num_replicas, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    if isinstance(num_replicas, int) and isinstance(rank, int):
        return num_replicas, rank
    return 1, 0


def order_name(sampler: Any, generators: Mapping[str, Any]) -> dict[str, Any]:
    """What names the order that a sampler is about to give, in plain values.

    Args:
        sampler: gives single indices; None where it cannot be seen.
        generators: the loader's private generators by name.
    """
    if sampler is None:
        return {"kind": UNKNOWN, "sampler": None}
    if isinstance(sampler, RandomAccess):
        return sampler.order_name()
    method = getattr(type(sampler), "__iter__", None)
    if is_seeded_by_epoch(sampler) and not sampler.replacement:
        length = len(sampler.data_source)
        if sampler.num_samples == length:
            seed = int(sampler.initial_seed)
            named = {"length": length, "seed": seed, "epoch": sampler.epoch}
            return {"kind": SEEDED_BY_EPOCH, **named}
    if method is SequentialSampler.__iter__:
        return {"kind": IN_ORDER, "length": len(sampler.data_source)}
    if method is DistributedSampler.__iter__:
        length = len(sampler.dataset)
        if not sampler.shuffle:
            return {"kind": IN_ORDER, "length": length}
        return {"kind": SEEDED, "length": length, "seed": sampler.seed, "epoch": sampler.epoch}
    if method is RandomSampler.__iter__ and not sampler.replacement:
        length = len(sampler.data_source)
        known = next((name for name, one in generators.items() if one is sampler.generator), None)
        if sampler.num_samples == length and (sampler.generator is None or known is not None):
            return {"kind": DRAWN, "length": length, "generator": known}
    return {"kind": UNKNOWN, "sampler": type(sampler).__name__}


def sampler_setting(order_name: Mapping[str, Any]) -> dict[str, Any]:
    """What names a sampler's orders in all epochs: its kind, and its seed where it has one."""
    return {key: value for key, value in order_name.items() if key in ("kind", "seed", "sampler")}


def require_same_name(then: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Raises DataPositionError unless two names are those of one order."""
    if then == now:
        return
    remedy = "Restore the former settings of the sampler"
    if then.get("seed") != now.get("seed") and then["kind"] == now["kind"]:
        remedy = f"Restore the seed of the sampler, {then['seed']}, until this epoch is over"
    elif (then["kind"] == IN_ORDER) != (now["kind"] == IN_ORDER):
        remedy = f"Restore shuffle={then['kind'] != IN_ORDER} until this epoch is over"
    raise DataPositionError(
        where,
        found=f"a sampler that gives another order ({_name_text(now)})",
        expected=f"the order of the interrupted run ({_name_text(then)})",
        remedy=remedy,
    )


def _name_text(name: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in name.items())


def may_draw_lazily(sampler: Any) -> bool:
    """Whether a sampler may draw from the global generators between two batches."""
    method = getattr(type(sampler), "__iter__", None)
    if method is BatchSampler.__iter__:
        return may_draw_lazily(sampler.sampler)
    is_known = method in _DRAW_AT_START or is_seeded_by_epoch(sampler)
    return not is_known and not isinstance(sampler, RandomAccess)


def redraw_order(name: Mapping[str, Any], start: Mapping[str, Any] | None) -> EpochOrder:
    """The order of that name, of a kind in ``NAMED``.

    Args:
        name: from ``order_name``.
        start: the RNG state at the epoch's start; needed for one that was drawn.
    """
    if name["kind"] == SEEDED:
        # torch's own code shuffles, for one rank that takes all.
        alone: DistributedSampler[Any] = DistributedSampler(
            range(name["length"]),  # type: ignore[arg-type]  # torch asks for its length alone
            num_replicas=1,
            rank=0,
            seed=name["seed"],
        )
        alone.set_epoch(name["epoch"])
        return np.fromiter(alone, dtype=np.int64, count=name["length"])
    if name["kind"] == SEEDED_BY_EPOCH:
        # accelerate 1.15 data_loader.py SeedableRandomSampler
        generator = torch.Generator().manual_seed(name["seed"] + name["epoch"])
        return _permutation(name["length"], generator)
    if name["kind"] == DRAWN:
        assert start is not None
        return _drawn(name["length"], name["generator"], start["at_first"])
    return draw(dict(name))


def _drawn(length: int, name: str | None, state: Mapping[str, Any]) -> EpochOrder:
    """What a RandomSampler drew when this was the RNG state, and its generator had this name."""
    before = torch.default_generator.get_state()
    generator = None
    if name is None:
        torch.default_generator.set_state(state["torch"])
    else:
        generator = torch.Generator()
        generator.set_state(state["generators"][name])
    order = _permutation(length, generator)
    torch.default_generator.set_state(before)
    return order


def _permutation(length: int, generator: torch.Generator | None) -> EpochOrder:
    indices = iter(RandomSampler(range(length), generator=generator))
    # At its own end the sampler would draw another permutation; it is not asked to come there.
    return np.fromiter(islice(indices, length), dtype=np.int64, count=length)
