"""A stand-in for a loader's index sampler that can begin an epoch again where it was left.

It yields what the user's sampler yields. On a resume it draws the same permutation from the same
random numbers and passes over the batches that were used, without touching the dataset.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from resumekit.capture import RngState
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
        """Takes in one batch's indices."""
        self._digest.update(_index_bytes(indices))

    def hexdigest(self) -> str:
        """The digest of all indices so far."""
        return str(self._digest.hexdigest())


def _index_bytes(indices: Any) -> bytes:
    if hasattr(indices, "tolist"):
        indices = indices.tolist()
    try:
        return array("q", indices if isinstance(indices, (list, tuple)) else [indices]).tobytes()
    except (TypeError, OverflowError):
        return repr(indices).encode()


@dataclass(frozen=True)
class Seek:
    """Where in an epoch to begin.

    Args:
        start: the random state to draw the epoch's order from.
        num_batches: the batches that were used.
        order: the digest of their indices.
        num_padding: the empty batches to yield first, which keep each worker's turn.
        eager: whether to go there when the iterator is made. A loader without workers asks its
            sampler only for the first batch, when the generators stand at the settled point.
    """

    start: EpochStart
    num_batches: int = 0
    order: str | None = None
    num_padding: int = 0
    eager: bool = False

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
        where: the loader's name, for errors.
    """

    def __init__(self, inner: Any, rng: RngState, where: str) -> None:
        self.inner = inner
        self.where = where
        self.drawn: deque[Any] = deque()
        self.start = EpochStart()
        self.order = Order()
        self._rng = rng
        self._seek: Seek | None = None

    def seek(self, seek: Seek) -> None:
        """Makes the next iteration begin there."""
        self._seek = seek

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: `iter(inner)` has to run when the loader asks for it, as without us.
        self.drawn.clear()
        self.order = Order()
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
        if seek is not None and seek.eager:
            self._find_place(inner)
        if after is not None:
            self._rng.load_state_dict(after)
        return self._indices(inner)

    def _indices(self, inner: Iterator[Any]) -> Iterator[Any]:
        if self.start.at_first is None:
            yield from self._padding(self._find_place(inner))
        for indices in inner:
            self.drawn.append(indices)
            yield indices

    def _find_place(self, inner: Iterator[Any]) -> int:
        """Goes to where the epoch begins for us; gives the number of padding batches due first."""
        seek, self._seek = self._seek, None
        if seek is not None and seek.start.at_first is not None:
            self._rng.load_state_dict(seek.start.at_first)
        self.start.at_first = self._rng.state_dict()
        if seek is None:
            return 0
        self._pass_over(inner, seek)
        return seek.num_padding

    def _padding(self, count: int) -> Iterator[Any]:
        for _ in range(count):
            padding = PaddingIndices()
            self.drawn.append(padding)
            yield padding

    def _pass_over(self, inner: Iterator[Any], seek: Seek) -> None:
        for number in range(seek.num_batches):
            try:
                self.order.add(next(inner))
            except StopIteration:
                raise DataPositionError(
                    self.where,
                    found=f"an epoch of {number} batches",
                    expected=f"at least the {seek.num_batches} that were already used",
                ) from None
        if seek.order is not None and self.order.hexdigest() != seek.order:
            raise DataPositionError(
                self.where,
                found=f"the sampler gives another order for the first {seek.num_batches} batches",
                expected="the order of the interrupted run",
                remedy="Draw the whole order when the epoch begins, or from a generator that is an "
                "attribute of the sampler",
            )
