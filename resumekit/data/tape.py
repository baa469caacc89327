"""The random numbers of loader workers, shipped with every batch and put back on a resume.

Each batch brings along its worker's id and random state after it. What counts is the state that
came with the worker's last *delivered* batch: whatever was prefetched is fetched again from there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as _pin


@dataclass(frozen=True)
class WorkerRandomState:
    """The three global generators of one worker process."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: bytes

    @classmethod
    def current(cls) -> WorkerRandomState:
        """The state of this process."""
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        return cls(
            random.getstate(),
            (kind, np.asarray(keys).tobytes(), int(position), int(has_gauss), float(gauss)),
            torch.get_rng_state().numpy().tobytes(),
        )

    def restore(self) -> None:
        """Sets this process's generators to the state."""
        random.setstate(self.python)
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32).copy(), *rest))
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))


@dataclass
class Taped:
    """A batch with the id and the random state of the worker that made it."""

    batch: Any
    worker: int
    state: WorkerRandomState

    def pin_memory(self, device: str | None = None) -> Taped:
        """The same with its tensors in pinned memory; called by the loader's pinning thread."""
        pinned = _pin(self.batch, device)  # type: ignore[no-untyped-call]
        return Taped(pinned, self.worker, self.state)


@dataclass(frozen=True)
class Padding:
    """What comes back for an empty index batch; it carries no data and is dropped."""


class TapingCollate:
    """The user's collate function, with the worker's random state beside its result.

    Args:
        collate: the user's own.
        num_padded: the workers, counted from 0, whose first index batch is empty padding.
    """

    def __init__(self, collate: Callable[[Any], Any], num_padded: int = 0) -> None:
        self.collate = collate
        self.num_padded = num_padded
        self._padding_seen = False

    def __call__(self, samples: Any) -> Any:
        info = get_worker_info()
        if info is None:
            return self.collate(samples)
        if info.id < self.num_padded and not self._padding_seen:
            self._padding_seen = True
            return Padding()
        return Taped(self.collate(samples), info.id, WorkerRandomState.current())


class TapingInit:
    """The user's ``worker_init_fn``, after which a worker continues from its recorded state.

    Args:
        init: the user's own, or None.
        states: by worker id; a worker that is not named keeps its ordinary seed.
    """

    def __init__(
        self, init: Callable[[int], Any] | None, states: dict[int, WorkerRandomState]
    ) -> None:
        self.init = init
        self.states = states

    def __call__(self, worker_id: int) -> None:
        if self.init is not None:
            self.init(worker_id)
        state = self.states.get(worker_id)
        if state is not None:
            state.restore()
