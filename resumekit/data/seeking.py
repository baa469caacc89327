"""The index sampler that resumekit puts into a loader: it records, digests and seeks an order."""

from __future__ import annotations

import dis
import gc
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
from types import FrameType, GeneratorType
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch.utils.data import BatchSampler

from resumekit.capture.rng import RngState
from resumekit.data.epoch_order import (
    DRAWN,
    NAMED,
    UNKNOWN,
    Batching,
    may_draw_lazily,
    redraw_order,
    require_same_name,
    sampler_setting,
)
from resumekit.data.stream_objects import instructions_ahead
from resumekit.data.workers import FetchRecorder, PaddingIndices
from resumekit.errors import DataPositionError

# ---------------------------------------------------------------- indices: digested, packed


@dataclass
class OrderDigest:
    """A running digest of the indices that were delivered, in their order.

    Args:
        digest: of what came before.
        packed: takes the indices themselves, as ``packed_integers``; None where nobody needs them.
        count: is given the indices as well; None where nobody counts them.
    """

    digest: Any = field(default_factory=xxhash.xxh3_128)
    packed: list[bytes | None] | None = None
    count: Callable[[Any], object] | None = None

    def add(self, indices: Any) -> bytes | None:
        """Takes in the indices of one batch, or of several in a row.

        Returns:
            What ``packed_integers`` gives of them.
        """
        packed = packed_integers(indices)
        self.digest.update(_index_bytes(indices) if packed is None else packed)
        if self.packed is not None:
            self.packed.append(packed)
        if self.count is not None:
            self.count(indices)
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
    code = instructions_ahead(frame)
    rest = [each.opname for each in code]
    if not _PLAIN_REST.issuperset(rest):
        return None
    if generator.gi_yieldfrom is not None:
        is_last = rest.count("SEND") + rest.count("YIELD_FROM") == 1 and "FOR_ITER" not in rest
        return generator.gi_yieldfrom if is_last else None
    named = (each.argval for each in code if each.opcode in dis.haslocal)
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


# ---------------------------------------------------------------- the index sampler

# Takes the user's sampler at the start of the epoch, and what takes in the indices that are passed
# over; returns the batches that are left.
Seeker: TypeAlias = Callable[[Iterator[Any], OrderDigest], Iterator[Any]]


def at_start(drawn: Iterator[Any], order: OrderDigest) -> Iterator[Any]:
    """All batches of the epoch."""
    return drawn


@dataclass(frozen=True)
class Seek:
    """Where in an epoch to begin.

    A sampler whose ``__iter__`` is a plain function draws when the iterator is made; one written
    as a generator draws at the first ``next``. In between the loader draws its workers' seed.

    Args:
        at_iter: the RNG state when the iterator was made; None asks for no state in particular.
        at_first: the state just before its first item; None likewise.
        items: the sampler's order where it was saved; the sampler is not asked then.
        seeker: how to get to the position.
        num_padding: the empty batches to yield first, which keep each worker's turn.
        eager: whether to go there when the iterator is made. A loader without workers asks its
            sampler only for the first batch, when the generators stand at the safe point.
        num_batches: the batches that were used.
        draws: the RNG states that a sampler drew from which draws as it goes.
    """

    at_iter: Mapping[str, Any] | None = None
    at_first: Mapping[str, Any] | None = None
    items: Sequence[Any] | None = None
    seeker: Seeker = at_start
    num_padding: int = 0
    eager: bool = False
    num_batches: int = 0
    draws: Mapping[str, Any] = field(default_factory=dict)


EPOCH_START = Seek()


class FollowedSampler:
    """Iterates a sampler, and keeps its iterator to be looked at."""

    def __init__(self) -> None:
        self.sampler: Any = ()
        self.iterator: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.sampler)
        return self.iterator  # type: ignore[no-any-return]


class RecordingSampler:
    """Yields what ``inner`` yields, remembers what it drew from, and can be sent to a position.

    Args:
        inner: the user's batch sampler, or sampler for a loader that does not collate.
        rng: the RNG state that the order may be drawn from.
        describe: gives the name of the order that ``inner`` is about to draw.

    Attributes:
        start: the RNG state at the two moments at which ``inner`` may draw its order, see ``Seek``.
        seeding: the RNG state from which the loader drew its workers' seed; None: it is about to.
    """

    def __init__(
        self, inner: Any, rng: RngState, describe: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self.inner = inner
        self.followed = FollowedSampler()
        self.drawn: deque[Any] = deque()
        self.start: dict[str, Any] = {"at_iter": None, "at_first": None}
        self.seeding: dict[str, Any] | None = None
        self.order = OrderDigest()
        self.order_name: dict[str, Any] = {}
        self.tape = FetchRecorder() if may_draw_lazily(inner) else None
        self._rng = rng
        self._describe = describe
        self._seek = EPOCH_START
        self._seeds_again = False  # the next iteration leaves the RNG state behind that it found
        self._stopped = False
        self._latest: Any = None  # of what was drawn, or of an order that was saved
        self._known: tuple[int, dict[str, Any] | None] = (0, None)  # the order, and of what time

    def seek(self, seek: Seek) -> None:
        """Makes the next iteration begin there; workers are seeded from the RNG state it finds."""
        self._seek, self._seeds_again = seek, not seek.eager

    def stop(self) -> None:
        """Gives no more in this iteration, and draws nothing either."""
        self._stopped = True

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # before __init__, as in a copy
            raise AttributeError(name)
        return getattr(self.inner, name)  # some loaders ask their batch sampler for its sampler

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: `iter(inner)` has to run when the loader asks for it, as without us.
        self.drawn.clear()
        self._latest, self._known = None, (0, None)
        self._stopped = False
        is_unknown = self._describe().get("kind") == UNKNOWN
        self.order = OrderDigest(packed=[] if is_unknown else None)
        seek = self._seek
        if seek.items is not None and len(seek.items):
            self._latest = seek.items[:1] if type(self.inner) is BatchSampler else seek.items[0]
        found = self._rng.state_dict() if self._seeds_again else None
        self._seeds_again = False
        if seek.at_iter is not None:
            self._rng.load_state_dict(seek.at_iter)
        self.start = {"at_iter": self._rng.state_dict(), "at_first": None}
        inner = self._begin_inner(seek.items)
        rest = self._seek_position(inner) if seek.eager else None
        # torch 2.13 utils/data/dataloader.py _MultiProcessingDataLoaderIter asks twice when it is
        # made, and draws the workers' seed in between.
        if found is not None:
            self._rng.load_state_dict(found)
        elif self.seeding is None:
            self.seeding = self._rng.state_dict()
        return self._indices(inner, rest)

    def _begin_inner(self, items: Sequence[Any] | None) -> Iterator[Any]:
        """The iterator over the user's sampler, or over its order that was saved."""
        batches = self.inner if type(self.inner) is BatchSampler else None
        sampler = self.inner if batches is None else batches.sampler
        self.followed.sampler = sampler if items is None else items
        if batches is None:
            return iter(self.followed)
        return iter(BatchSampler(self.followed, batches.batch_size, batches.drop_last))

    def seeker(self, state: Mapping[str, Any], batching: Batching, *, where: str) -> Seeker:
        """How it reaches a position.

        Args:
            state: the position, in this loader's geometry.
            batching: how the loader divides its order.
            where: the loader's name.

        Returns:
            It raises DataPositionError when the position is not in the epoch that ``inner`` gives.
        """
        digest, reshared = state["used"]["digest"], is_reshared(state)
        is_turn = batching.by_batches and not reshared
        if batching.sampler is None or state["draws"] or is_turn:
            return partial(_skip_batches, where=where, num_batches=state["batch"], digest=digest)
        if reshared or batching.has_random_access:
            return lambda drawn, order: batching.in_batches(
                _rest_of_epoch(state, batching, self._describe(), where=where)
            )
        then, now = state["order_name"], self._describe()
        is_known = {then["kind"], now["kind"]} <= NAMED
        if digest is None or (is_known and sampler_setting(then) != sampler_setting(now)):
            require_same_name(then, now, where)
        used = used_here(state)
        skip = partial(_skip_samples, samples=self.followed, batching=batching)
        return partial(skip, where=where, num_samples=used, digest=digest)

    def drawn_order(self) -> dict[str, Any] | None:
        """The whole order of the epoch, where it has no name and the sampler has drawn it all."""
        packed, latest = self.order.packed, self._latest
        if packed is None or latest is None:
            return None
        num_drawn = len(packed) + len(self.drawn)
        # Of a sampler that has given its last index the order may be known after its end only.
        if self._known[0] != num_drawn or self._known[1] is None:
            rest = rest_of(self.followed.iterator)
            given = [*packed, *map(packed_integers, self.drawn)]
            like = latest[0] if type(self.inner) is BatchSampler else latest
            self._known = num_drawn, None if rest is None else pack_order(given, rest, like)
        return self._known[1]

    def _indices(self, inner: Iterator[Any], rest: Iterator[Any] | None) -> Iterator[Any]:
        rest = self._seek_position(inner) if rest is None else rest
        while not self._stopped:
            try:
                indices = next(rest)
            except StopIteration:
                return
            self.drawn.append(indices)
            self._latest = indices
            yield indices

    def _seek_position(self, inner: Iterator[Any]) -> Iterator[Any]:
        """The padding batches that are due first, then the batches from where the epoch begins."""
        seek, self._seek = self._seek, EPOCH_START
        if seek.at_first is not None:
            self._rng.load_state_dict(seek.at_first)
        self.start["at_first"] = self._rng.state_dict()
        self.order_name = self._describe()
        if self.tape is not None:
            self.tape.begin(seek.draws)
            inner = self.tape.fetches(inner)
        rest = seek.seeker(inner, self.order)
        if self.tape is not None and rest is not inner:
            rest = self.tape.fetches(rest, seek.num_batches)
        return chain((PaddingIndices() for _ in range(seek.num_padding)), rest)


# The indices that are passed over at once.
_CHUNK = 1 << 16


def is_reshared(state: Mapping[str, Any]) -> bool:
    """Whether the rest of the epoch is not the one that the loader's own sampler gives."""
    return bool(state.get("reshared")) or state["used"]["since"] > 0


def start_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the loader's own sampler is to draw the current epoch from, see ``Seek``."""
    start = {} if is_reshared(state) else state["start"] or {}
    return {moment: start[moment] for moment in ("at_iter", "at_first") if moment in start}


DRAWN_HERE = (
    "how this epoch was drawn is not in the checkpoint that was imported: its rest is that of the "
    "order that this launch has drawn"
)


def used_here(state: Mapping[str, Any]) -> int:
    """The samples that one rank used in the current epoch."""
    return int(state["samples"]) // int(state["geometry"]["num_replicas"])


def _skip_batches(
    drawn: Iterator[Any], order: OrderDigest, *, where: str, num_batches: int, digest: str | None
) -> Iterator[Any]:
    """Draws batches until the position is reached, which any sampler can do."""
    for number in range(num_batches):
        try:
            order.add(next(drawn))
        except StopIteration:
            raise _too_short(where, number, num_batches, "batches") from None
    _require_order(where, order, digest, f"{num_batches} batches")
    return drawn


def _skip_samples(
    drawn: Iterator[Any],
    order: OrderDigest,
    *,
    samples: Iterable[Any],
    where: str,
    num_samples: int,
    digest: str | None,
    batching: Batching,
) -> Iterator[Any]:
    """Draws single indices until the position is reached: fast, and whatever the batch size was."""
    indices = drawn if batching.batch_sampler is None else iter(samples)
    left = num_samples
    while left:
        passed = list(islice(indices, min(left, _CHUNK)))
        if not passed:
            raise _too_short(where, num_samples - left, num_samples, "samples")
        order.add(passed)
        left -= len(passed)
    _require_order(where, order, digest, f"{num_samples} samples")
    is_at_end = batching.samples_per_rank in (None, num_samples)
    if num_samples % batching.batch_size and is_at_end:
        # The last batch was short: the interrupted run has seen the end, where some draw.
        indices = chain([*islice(indices, 1)], indices)
    return batching.in_batches(indices)


def _rest_of_epoch(
    state: Mapping[str, Any], batching: Batching, live_name: Mapping[str, Any], *, where: str
) -> Iterator[int]:
    """This rank's indices of the rest of the current epoch, without drawing those before."""
    name, position, used = state["order_name"], state["samples"], state["used"]
    is_same_kind = name["kind"] == live_name["kind"]
    if not is_reshared(state) or (is_same_kind and name["kind"] != DRAWN):
        require_same_name(name, live_name, where)
    if is_same_kind and batching.has_random_access:
        return batching.sampler.iterate_from(position)  # type: ignore[no-any-return]
    order = redraw_order(name, state["start"])
    if used["digest"] is not None:
        digest = OrderDigest()
        digest.add(order[_used_positions(used, position)])
        _require_order(where, digest, used["digest"], f"{position} samples")
    return batching.share(order, position)


def _used_positions(used: Mapping[str, Any], position: int) -> Any:
    """The positions in the order that one rank used."""
    positions = np.arange(used["since"], position)
    rounds = (positions - used["since"]) // used["in_a_row"]
    return positions[rounds % used["num_replicas"] == used["replica"]]


def _require_order(where: str, order: OrderDigest, digest: str | None, what: str) -> None:
    """Raises DataPositionError unless what was passed over is what the interrupted run used."""
    if digest is not None and order.hexdigest() != digest:
        raise DataPositionError(
            where,
            found=f"the sampler gives another order for the first {what}",
            expected="the order of the interrupted run",
            remedy="Draw the whole order when the epoch begins, or from a generator that is an "
            "attribute of the sampler",
        )


def _too_short(where: str, found: int, expected: int, unit: str) -> DataPositionError:
    return DataPositionError(
        where,
        found=f"an epoch of {found} {unit}",
        expected=f"at least the {expected} that were already used",
    )
