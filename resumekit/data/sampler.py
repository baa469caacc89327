"""A stand-in for a loader's index sampler that can begin an epoch again where it was left.

It yields what the user's sampler yields. On a resume it draws the same permutation from the same
random numbers and passes over what was used, without touching the dataset; a sampler with random
access begins at the place, and draws and passes over nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol

import xxhash
from torch.utils.data import BatchSampler

from resumekit.capture import RngState
from resumekit.data.fetches import FetchTape, Playback, TapedDraws
from resumekit.data.orders import may_draw_as_it_goes
from resumekit.errors import DataPositionError


@dataclass
class EpochStart:
    """The random state at the two moments at which a sampler may draw its order.

    A sampler whose ``__iter__`` is a plain function draws when the iterator is made; one written
    as a generator draws at the first ``next``. In between the loader draws its workers' seed.

    Args:
        at_iter: the state when the iterator was made; None asks for no state in particular.
        at_first: the state just before its first item; None likewise.
    """

    at_iter: dict[str, Any] | None = None
    at_first: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"at_iter": self.at_iter, "at_first": self.at_first}


@dataclass
class Order:
    """A running digest of the indices that were delivered, in their order."""

    _digest: Any = field(default_factory=xxhash.xxh3_128)

    def add(self, indices: Any) -> None:
        """Takes in the indices of one batch, or of several in a row."""
        self._digest.update(_index_bytes(indices))

    def hexdigest(self) -> str:
        """The digest of all indices so far."""
        return str(self._digest.hexdigest())


def _index_bytes(indices: Any) -> bytes:
    """The bytes of each index after the other, however they come in batches."""
    if hasattr(indices, "tolist"):
        indices = indices.tolist()
    if not isinstance(indices, (list, tuple)):
        indices = [indices]
    try:
        return array("q", indices).tobytes()
    except (TypeError, OverflowError):
        return b"".join(map(_one_index_bytes, indices))


def _one_index_bytes(index: Any) -> bytes:
    if isinstance(index, (list, tuple)):  # one index of a loader that does not collate
        return _index_bytes(index)
    try:
        return array("q", [index]).tobytes()
    except (TypeError, OverflowError):
        return repr(index).encode() + b"\n"


# The indices that are passed over at once.
_CHUNK = 1 << 16


class WayIn(Protocol):
    """How an epoch is begun at a place: ``rest`` gives the batches from there on."""

    def rest(self, drawn: Iterator[Any], order: Order) -> Iterator[Any]:
        """The batches that are left.

        Args:
            drawn: the user's sampler, at the start of the epoch.
            order: takes in what is passed over.

        Raises:
            DataPositionError: the place is not in the epoch that the sampler gives.
        """
        ...


@dataclass(frozen=True)
class PassBatches:
    """Draws batches until the place is reached, which any sampler can do.

    Args:
        where: the loader's name, for errors.
        num_batches: the batches that were used.
        digest: of their indices.
    """

    where: str
    num_batches: int
    digest: str | None

    def rest(self, drawn: Iterator[Any], order: Order) -> Iterator[Any]:
        """The batches that are left."""
        for number in range(self.num_batches):
            try:
                order.add(next(drawn))
            except StopIteration:
                raise _too_short(self.where, number, self.num_batches, "batches") from None
        require_order(self.where, order, self.digest, f"{self.num_batches} batches")
        return drawn


@dataclass(frozen=True)
class PassSamples:
    """Draws single indices until the place is reached: fast, and whatever the batch size was.

    Args:
        where: the loader's name, for errors.
        num_samples: the samples that this rank used.
        digest: of their indices.
        batching: the loader's batch sampler; None for a loader that does not collate.
    """

    where: str
    num_samples: int
    digest: str | None
    batching: BatchSampler | None

    def rest(self, drawn: Iterator[Any], order: Order) -> Iterator[Any]:
        """The batches that are left."""
        indices = drawn if self.batching is None else iter(self.batching.sampler)
        left = self.num_samples
        while left:
            passed = list(islice(indices, min(left, _CHUNK)))
            if not passed:
                used = self.num_samples
                raise _too_short(self.where, used - left, used, "samples")
            order.add(passed)
            left -= len(passed)
        require_order(self.where, order, self.digest, f"{self.num_samples} samples")
        if self.batching is not None and self.num_samples % self.batching.batch_size:
            # The last batch was short: the interrupted run has seen the end, where some draw.
            indices = chain([*islice(indices, 1)], indices)
        return in_batches(indices, self.batching)


@dataclass(frozen=True)
class Begin:
    """Goes to the place at once.

    Args:
        indices: gives this rank's indices from there on.
        batching: the loader's batch sampler; None for a loader that does not collate.
    """

    indices: Callable[[], Iterator[int]]
    batching: BatchSampler | None

    def rest(self, drawn: Iterator[Any], order: Order) -> Iterator[Any]:
        """The batches that are left."""
        return in_batches(self.indices(), self.batching)


def in_batches(indices: Iterator[int], batching: BatchSampler | None) -> Iterator[Any]:
    """The indices in batches as this batch sampler makes them, or one by one without it."""
    if batching is None:
        return indices
    return iter(BatchSampler(indices, batching.batch_size, batching.drop_last))


def require_order(where: str, order: Order, digest: str | None, what: str) -> None:
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


@dataclass(frozen=True)
class Seek:
    """Where in an epoch to begin.

    Args:
        start: the random state to draw the epoch's order from.
        way_in: how to get to the place; None is the start of the epoch.
        num_padding: the empty batches to yield first, which keep each worker's turn.
        eager: whether to go there when the iterator is made. A loader without workers asks its
            sampler only for the first batch, when the generators stand at the settled point.
        num_batches: the batches that were used.
        draws: the random states that a sampler drew from which draws as it goes.
    """

    start: EpochStart
    way_in: WayIn | None = None
    num_padding: int = 0
    eager: bool = False
    num_batches: int = 0
    draws: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keeps_worker_seed(self) -> bool:
        """Whether a loader with workers begins again in the middle of an epoch."""
        return self.start.at_first is not None and not self.eager


class PaddingIndices(list[int]):
    """An empty index batch that only advances the workers' turn."""


class RecordingSampler:
    """Yields what ``inner`` yields, remembers what it drew from, and can be sent to a place.

    Args:
        inner: the user's batch sampler, or sampler for a loader that does not collate.
        rng: the random state that the order may be drawn from.
        describe: gives the name of the order that ``inner`` is about to draw.
    """

    def __init__(
        self, inner: Any, rng: RngState, describe: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self.inner = inner
        self.drawn: deque[Any] = deque()
        self.start = EpochStart()
        self.order = Order()
        self.order_name: dict[str, Any] = {}
        self.tape = FetchTape() if may_draw_as_it_goes(inner) else None
        self._rng = rng
        self._describe = describe
        self._seek: Seek | None = None
        self._stopped = False

    def seek(self, seek: Seek) -> None:
        """Makes the next iteration begin there."""
        self._seek = seek

    def stop(self) -> None:
        """Gives no more in this iteration, and draws nothing either."""
        self._stopped = True

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: `iter(inner)` has to run when the loader asks for it, as without us.
        self.drawn.clear()
        self.order = Order()
        self._stopped = False
        seek, after = self._seek, None
        if seek is not None and seek.keeps_worker_seed:
            # The loader draws its workers' seed next. It must find the random state that this very
            # call left behind in the interrupted run, while the order is drawn from another one.
            iter(self.inner)
            after = self._rng.state_dict()
        if seek is not None and seek.start.at_iter is not None:
            self._rng.load_state_dict(seek.start.at_iter)
        self.start = EpochStart(at_iter=self._rng.state_dict())
        inner = iter(self.inner)
        place = self._find_place(inner) if seek is not None and seek.eager else None
        if after is not None:
            self._rng.load_state_dict(after)
        return self._indices(inner, place)

    def _indices(
        self, inner: Iterator[Any], place: tuple[int, Iterator[Any]] | None
    ) -> Iterator[Any]:
        num_padding, rest = self._find_place(inner) if place is None else place
        for _ in range(num_padding):
            padding = PaddingIndices()
            self.drawn.append(padding)
            yield padding
        while not self._stopped:
            try:
                indices = next(rest)
            except StopIteration:
                return
            self.drawn.append(indices)
            yield indices

    def _find_place(self, inner: Iterator[Any]) -> tuple[int, Iterator[Any]]:
        """The padding batches that are due first, and the batches from where the epoch begins."""
        seek, self._seek = self._seek, None
        if seek is not None and seek.start.at_first is not None:
            self._rng.load_state_dict(seek.start.at_first)
        self.start.at_first = self._rng.state_dict()
        self.order_name = self._describe()
        if self.tape is not None:
            self.tape.begin()
            inner = TapedDraws(inner, self.tape, Playback({} if seek is None else seek.draws))
        if seek is None or seek.way_in is None:
            return 0, inner
        rest = seek.way_in.rest(inner, self.order)
        if isinstance(inner, TapedDraws) and rest is not inner:
            rest = inner.followed_by(rest, seek.num_batches)
        return seek.num_padding, rest
