"""The random states that batches were fetched from, where drawing again would not lead to them.

A loader without workers draws from the same global generators as the training step. Drawn through
again, without the training in between, it would soon draw other numbers. So the state before a
fetch is kept for each generator that the fetch drew from after somebody else had. Where training
draws on its device, and the dataset on the CPU or in workers, that is nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from resumekit.data.states import read_states, write_states

# 5 KB for each batch and generator: enough for an epoch of 13,000 batches.
MAX_BYTES = 64 * 1024 * 1024


class FetchTape:
    """Watches every fetch of an epoch, and plays the epoch again.

    Attributes:
        overflowed: whose states took more than ``MAX_BYTES``; empty while they do not. The tape of
            this epoch is then given up.
    """

    def __init__(self) -> None:
        self.overflowed = ""
        self._records: dict[str, dict[int, bytes]] = {}
        self._reached: dict[str, bytes] = {}  # where drawing again would be now
        self._before: dict[str, bytes] = {}
        self._num_bytes = 0

    def begin(self) -> None:
        """The epoch's iterator was just made."""
        self.overflowed, self._num_bytes = "", 0
        self._records = {}
        self._reached = read_states()

    def before(self) -> None:
        """The next batch is about to be fetched."""
        self._before = read_states()

    def after(self, number: int) -> None:
        """The batch of this number in the epoch was fetched."""
        for name, state in read_states().items():
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
        self._records.setdefault(name, {})[number] = state

    def state_dict(self) -> dict[str, Any]:
        """The recorded states, one array for each generator."""
        return {
            name: {
                "batches": np.array(list(records), dtype=np.int64),
                "states": np.frombuffer(b"".join(records.values()), dtype=np.uint8).reshape(
                    len(records), -1
                ),
            }
            for name, records in self._records.items()
        }


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
