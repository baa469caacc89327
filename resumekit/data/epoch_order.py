"""The order of an epoch: how a loader divides it, its name, its digest, and redrawing it."""

from __future__ import annotations

import dis
import gc
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, islice
from types import FrameType, GeneratorType
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
    """A running digest of the indices that were delivered, in their order.

    Args:
        digest: of what came before.
        packed: takes the indices themselves, as ``packed_integers``; None where nobody needs them.
    """

    digest: Any = field(default_factory=xxhash.xxh3_128)
    packed: list[bytes | None] | None = None

    def add(self, indices: Any) -> bytes | None:
        """Takes in the indices of one batch, or of several in a row.

        Returns:
            What ``packed_integers`` gives of them.
        """
        packed = packed_integers(indices)
        self.digest.update(_index_bytes(indices) if packed is None else packed)
        if self.packed is not None:
            self.packed.append(packed)
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


# ---------------------------------------------------------------- an order that lies in a list

# What a suspended generator may still run to give the rest of an iterator, and do nothing else.
_PLAIN_REST = frozenset(
    {
        *("FOR_ITER", "END_FOR", "POP_ITER", "YIELD_VALUE", "YIELD_FROM", "SEND", "END_SEND"),
        *("STORE_FAST", "LOAD_FAST", "STORE_FAST_LOAD_FAST", "LOAD_CONST", "POP_TOP", "NOP"),
        *("JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "CLEANUP_THROW"),
        *("RESUME", "RETURN_VALUE", "RETURN_CONST", "CALL_INTRINSIC_1", "RERAISE"),
    }
)
_ITS_VARIABLE = (["STORE_FAST", "LOAD_FAST"], ["STORE_FAST_LOAD_FAST"])
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_SEQUENCES = (list, tuple, range, np.ndarray)


def rest_of(iterator: Any) -> Sequence[Any] | None:
    """What an iterator is still to give; None where it may depend on what happens until then.

    Known is the rest of a sequence, also where a generator passes it on. Nothing is drawn, and the
    iterator stays where it is.
    """
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return () if frame is None else rest_of(_passed_on(iterator, frame))
    if type(iterator).__module__ != "builtins" or not hasattr(iterator, "__setstate__"):
        return None
    # CPython 3.10 to 3.13 Objects/listobject.c, tupleobject.c, rangeobject.c, iterobject.c: pickled
    # as iter, what it goes over, and the position, where that is not the start.
    made_by, (sequence, *_), *position = iterator.__reduce__()
    if made_by is not iter or type(sequence) not in _SEQUENCES:
        return None
    return sequence[next(iter(position), None) or 0 :]  # type: ignore[no-any-return]


def _passed_on(generator: GeneratorType[Any, Any, Any], frame: FrameType) -> Any:
    """The iterator whose items a suspended generator gives as they are until its end, or None."""
    code = [each for each in dis.get_instructions(frame.f_code) if each.opname != "EXTENDED_ARG"]
    ahead = (e.argval for e in code if e.offset > frame.f_lasti and e.opcode in _JUMPS)
    first = min((frame.f_lasti, *ahead))  # a jump back leads to the start of a loop
    rest = [each.opname for each in code if each.offset >= first]
    if not _PLAIN_REST.issuperset(rest):
        return None
    if generator.gi_yieldfrom is not None:
        is_last = rest.count("SEND") + rest.count("YIELD_FROM") == 1 and "FOR_ITER" not in rest
        return generator.gi_yieldfrom if is_last else None
    named = (e.argval for e in code if e.offset >= first and e.opcode in dis.haslocal)
    variables = set(chain.from_iterable(n if isinstance(n, tuple) else (n,) for n in named))
    if rest.count("FOR_ITER") != 1 or rest.count("YIELD_VALUE") != 1 or len(variables) != 1:
        return None
    if rest[rest.index("FOR_ITER") + 1 : rest.index("YIELD_VALUE")] not in _ITS_VARIABLE:
        return None
    parts = (*gc.get_referents(generator), *gc.get_referents(frame))
    iterators = {id(each): each for each in parts if isinstance(each, Iterator)}
    return iterators.popitem()[1] if len(iterators) == 1 else None


def pack_order(
    given: Sequence[bytes | None], rest: Sequence[Any], like: Any
) -> dict[str, Any] | None:
    """An order as it is saved; None where it does not consist of indices, or of lists of them.

    Args:
        given: the packed indices of the items that were given, or of batches of them.
        rest: the items that are left.
        like: one of the items that were given.
    """
    lists = type(like) is list
    flat = list(chain.from_iterable(rest)) if lists else rest
    kinds = {type(each) for each in (like if lists else [like])} | set(map(type, flat))
    packed = packed_integers(flat)
    if len(kinds) != 1 or not kinds <= _MAKE.keys() or packed is None or None in given:
        return None
    past = [each for each in given if each is not None]
    lengths = [*(len(each) // 8 for each in past), *map(len, rest)] if lists else None
    return {
        "indices": np.frombuffer(b"".join((*past, packed)), dtype=np.int64),
        "lengths": None if lengths is None else np.asarray(lengths, dtype=np.int64),
        "kind": kinds.pop().__name__,
    }


def unpack_order(saved: Mapping[str, Any]) -> Sequence[Any]:
    """The items of an order that was saved."""
    indices, lengths = saved["indices"], saved["lengths"]
    if lengths is not None:
        return [each.tolist() for each in np.split(indices, np.cumsum(lengths)[:-1])]
    make = {kind.__name__: make for kind, make in _MAKE.items()}[saved["kind"]]
    return make(indices)  # type: ignore[no-any-return]


# How the items of each type are made of 64-bit integers.
_MAKE: dict[type, Callable[[Any], Any]] = {
    int: lambda indices: indices.tolist(),
    np.int64: lambda indices: indices,
    torch.Tensor: lambda indices: torch.from_numpy(indices.copy()).unbind(),
}
