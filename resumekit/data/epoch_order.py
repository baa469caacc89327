"""The order of an epoch: how a loader divides it, its name, its digest, and redrawing it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from resumekit.data.loader_introspection import (
    is_seeded_by_epoch,
    known_length,
    shards_whole_batches,
)
from resumekit.data.samplers import (
    EpochOrder,
    RandomAccess,
    draw,
    shard_length,
    share,
)
from resumekit.errors import DataPositionError

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


@dataclass
class OrderDigest:
    """A running digest of the indices that were delivered, in their order."""

    digest: Any = field(default_factory=xxhash.xxh3_128)

    def add(self, indices: Any) -> bytes | None:
        """Takes in the indices of one batch, or of several in a row.

        Returns:
            What ``packed_integers`` gives of them.
        """
        packed = packed_integers(indices)
        self.digest.update(_index_bytes(indices) if packed is None else packed)
        return packed

    def hexdigest(self) -> str:
        """The digest of all indices so far."""
        return str(self.digest.hexdigest())


def packed_integers(indices: Any) -> bytes | None:
    """One or more indices as 64-bit integers; None where one of them is no such integer."""
    if type(indices) is not list:
        indices = _as_sequence(indices)
    try:
        return _packer(len(indices))(*indices)
    except (struct.error, TypeError):
        return None


@lru_cache(maxsize=8)  # a batch is mostly as long as the one before
def _packer(num_indices: int) -> Callable[..., bytes]:
    return struct.Struct(f"{num_indices}q").pack


def _as_sequence(indices: Any) -> Sequence[Any]:
    if hasattr(indices, "tolist"):
        indices = indices.tolist()
    return indices if isinstance(indices, (list, tuple)) else [indices]


def _index_bytes(indices: Any) -> bytes:
    """The bytes of each index after the other, however they come in batches."""
    return b"".join(map(_one_index_bytes, _as_sequence(indices)))


def _one_index_bytes(index: Any) -> bytes:
    if isinstance(index, (list, tuple)):  # one index of a loader that does not collate
        return _index_bytes(index)
    packed = packed_integers([index])
    return repr(index).encode() + b"\n" if packed is None else packed
