"""The random states that batches were fetched from, where drawing again would not lead to them.

A loader without workers draws from the same global generators as the training step, and so may a
sampler of the user's own. Drawn through again, without the training in between, it would soon draw
other numbers. So the state before a fetch is kept for each generator that the fetch drew from after
somebody else had. Where training draws on its device, and the dataset on the CPU or in workers,
that is nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from resumekit.data.states import StateReader, write_states

# 5 KB for each batch and generator: enough for an epoch of 13,000 batches.
MAX_BYTES = 64 * 1024 * 1024


class _Records:
    """The states of one generator, in two arrays that grow; what was read of them stays as it is.

    A loader that fetches ahead takes the state of its place before every fetch, and keeps it for a
    while. Each is a view of these arrays, so an epoch of many records costs no copies.
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


class FetchTape:
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
    """Sets, before each fetch, the random states that it was made from.

    Args:
        recorded: what ``FetchTape.state_dict`` gave.
    """

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        self._states: dict[int, dict[str, bytes]] = {}
        for name, records in recorded.items():
            for number, state in zip(records["batches"].tolist(), records["states"], strict=True):
                self._states.setdefault(number, {})[name] = state.tobytes()

    def before(self, number: int) -> None:
        """The batch of this number in the epoch is about to be fetched again."""
        write_states(self._states.get(number, {}))


class TapedDraws:
    """What an iterator yields, with a tape that watches each ``next``.

    Args:
        drawn: the iterator.
        tape: watches.
        playback: sets the states from which the first items were drawn before.
        number: of the first item.
    """

    def __init__(
        self, drawn: Iterator[Any], tape: FetchTape, playback: Playback, number: int = 0
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

    def followed_by(self, rest: Iterator[Any], number: int) -> TapedDraws:
        """The same tape over another iterator, whose first item has this number."""
        return TapedDraws(rest, self._tape, self._playback, number)
