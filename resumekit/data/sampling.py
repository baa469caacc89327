"""The index sampler that resumekit puts into a loader, and the RNG states that it records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from resumekit.capture import RngState
from resumekit.data.order import (
    OrderDigest,
    Seeker,
    may_draw_lazily,
)
from resumekit.data.workers import PaddingIndices, StateReader, write_states


@dataclass
class EpochStart:
    """The RNG state at the two moments at which a sampler may draw its order.

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


@dataclass(frozen=True)
class Seek:
    """Where in an epoch to begin.

    Args:
        start: the RNG state to draw the epoch's order from.
        seeker: how to get to the position; None is the start of the epoch.
        num_padding: the empty batches to yield first, which keep each worker's turn.
        eager: whether to go there when the iterator is made. A loader without workers asks its
            sampler only for the first batch, when the generators stand at the safe point.
        num_batches: the batches that were used.
        draws: the RNG states that a sampler drew from which draws as it goes.
    """

    start: EpochStart
    seeker: Seeker | None = None
    num_padding: int = 0
    eager: bool = False
    num_batches: int = 0
    draws: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keeps_worker_seed(self) -> bool:
        """Whether a loader with workers begins again in the middle of an epoch."""
        return self.start.at_first is not None and not self.eager


class RecordingSampler:
    """Yields what ``inner`` yields, remembers what it drew from, and can be sent to a position.

    Args:
        inner: the user's batch sampler, or sampler for a loader that does not collate.
        rng: the RNG state that the order may be drawn from.
        describe: gives the name of the order that ``inner`` is about to draw.
    """

    def __init__(
        self, inner: Any, rng: RngState, describe: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self.inner = inner
        self.drawn: deque[Any] = deque()
        self.start = EpochStart()
        self.order = OrderDigest()
        self.order_name: dict[str, Any] = {}
        self.tape = FetchRecorder() if may_draw_lazily(inner) else None
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
        self.order = OrderDigest()
        self._stopped = False
        seek, after = self._seek, None
        if seek is not None and seek.keeps_worker_seed:
            # The loader draws its workers' seed next. It must find the RNG state that this very
            # call left behind in the interrupted run, while the order is drawn from another one.
            iter(self.inner)
            after = self._rng.state_dict()
        if seek is not None and seek.start.at_iter is not None:
            self._rng.load_state_dict(seek.start.at_iter)
        self.start = EpochStart(at_iter=self._rng.state_dict())
        inner = iter(self.inner)
        position = self._seek_position(inner) if seek is not None and seek.eager else None
        if after is not None:
            self._rng.load_state_dict(after)
        return self._indices(inner, position)

    def _indices(
        self, inner: Iterator[Any], position: tuple[int, Iterator[Any]] | None
    ) -> Iterator[Any]:
        num_padding, rest = self._seek_position(inner) if position is None else position
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

    def _seek_position(self, inner: Iterator[Any]) -> tuple[int, Iterator[Any]]:
        """The padding batches that are due first, and the batches from where the epoch begins."""
        seek, self._seek = self._seek, None
        if seek is not None and seek.start.at_first is not None:
            self._rng.load_state_dict(seek.start.at_first)
        self.start.at_first = self._rng.state_dict()
        self.order_name = self._describe()
        if self.tape is not None:
            self.tape.begin()
            inner = RecordedDraws(inner, self.tape, Playback({} if seek is None else seek.draws))
        if seek is None or seek.seeker is None:
            return 0, inner
        rest = seek.seeker.rest(inner, self.order)
        if isinstance(inner, RecordedDraws) and rest is not inner:
            rest = inner.followed_by(rest, seek.num_batches)
        return seek.num_padding, rest


# 5 KB for each batch and generator: enough for an epoch of 13,000 batches.
MAX_BYTES = 64 * 1024 * 1024


class _Records:
    """The states of one generator, in two arrays that grow; what was read of them stays as it is.

    A prefetching loader takes the state of its position before every fetch and keeps it. Each is a
    view of these arrays, so an epoch of many records costs no copies.
    """

    def __init__(self) -> None:
        self._num = 0
        self._batches = np.empty(0, dtype=np.int64)
        self._states = np.empty((0, 0), dtype=np.uint8)

    def add(self, number: int, state: bytes) -> None:
        if self._num == len(self._batches):
            self._grow(len(state))
        self._batches[self._num] = number
        self._states[self._num] = np.frombuffer(state, dtype=np.uint8)
        self._num += 1

    def _grow(self, width: int) -> None:
        batches, states = self._batches, self._states
        capacity = max(16, 2 * self._num)
        self._batches = np.empty(capacity, dtype=np.int64)
        self._states = np.empty((capacity, width), dtype=np.uint8)
        if self._num:
            self._batches[: self._num], self._states[: self._num] = batches, states

    def as_arrays(self) -> dict[str, Any]:
        return {"batches": self._batches[: self._num], "states": self._states[: self._num]}


class FetchRecorder:
    """Watches every fetch of an epoch, and plays the epoch again.

    Attributes:
        overflowed: whose states took more than ``MAX_BYTES``; empty while they do not. The tape of
            this epoch is then given up.
    """

    def __init__(self) -> None:
        self.overflowed = ""
        self._reader = StateReader()
        self._records: dict[str, _Records] = {}
        self._reached: dict[str, bytes] = {}  # where drawing again would be now
        self._before: dict[str, bytes] = {}
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether drawing again leads to every batch of this epoch so far."""
        return not (self._records or self.overflowed)

    def begin(self) -> None:
        """The epoch's iterator was just made."""
        self.overflowed, self._num_bytes = "", 0
        self._records = {}
        self._reached = self._reader.read()

    def before(self) -> None:
        """The next batch is about to be fetched."""
        self._before = self._reader.read()

    def after(self, number: int) -> None:
        """The batch of this number in the epoch was fetched."""
        for name, state in self._reader.read().items():
            before = self._before.get(name)
            if state == before:
                continue
            if before is not None and before != self._reached.get(name):
                self._record(name, number, before)
            self._reached[name] = state

    def _record(self, name: str, number: int, state: bytes) -> None:
        if self.overflowed:
            return
        self._num_bytes += len(state)
        if self._num_bytes > MAX_BYTES:
            self.overflowed = name
            self._records = {}
            return
        self._records.setdefault(name, _Records()).add(number, state)

    def state_dict(self) -> dict[str, Any]:
        """The recorded states, one array for each generator; they are not to be changed."""
        return {name: records.as_arrays() for name, records in self._records.items()}


class Playback:
    """Sets, before each fetch, the RNG states that it was made from.

    Args:
        recorded: what ``FetchRecorder.state_dict`` gave.
    """

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        self._states: dict[int, dict[str, bytes]] = {}
        for name, records in recorded.items():
            for number, state in zip(records["batches"].tolist(), records["states"], strict=True):
                self._states.setdefault(number, {})[name] = state.tobytes()

    def before(self, number: int) -> None:
        """The batch of this number in the epoch is about to be fetched again."""
        write_states(self._states.get(number, {}))


class RecordedDraws:
    """What an iterator yields, with a tape that watches each ``next``.

    Args:
        drawn: the iterator.
        tape: watches.
        playback: sets the states from which the first items were drawn before.
        number: of the first item.
    """

    def __init__(
        self, drawn: Iterator[Any], tape: FetchRecorder, playback: Playback, number: int = 0
    ) -> None:
        self._drawn = drawn
        self._tape = tape
        self._playback = playback
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        number = self._number
        self._number += 1
        self._playback.before(number)
        self._tape.before()
        item = next(self._drawn)
        self._tape.after(number)
        return item

    def followed_by(self, rest: Iterator[Any], number: int) -> RecordedDraws:
        """The same tape over another iterator, whose first item has this number."""
        return RecordedDraws(rest, self._tape, self._playback, number)
