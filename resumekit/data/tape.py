"""The random numbers of loader workers, shipped with every batch and put back on a resume.

Each batch brings along its worker's id and random state after it. What counts is the state that
came with the worker's last *delivered* batch: whatever was prefetched is fetched again from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import MapDataPipe, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as _pin

from resumekit.data.sampler import PaddingIndices
from resumekit.data.states import StateReader, write_states


@dataclass(frozen=True)
class WorkerRandomState:
    """The global generators of one worker process, as bytes: number by number they ship slowly."""

    states: dict[str, bytes]

    def restore(self) -> None:
        """Sets this process's generators to the state."""
        write_states(self.states)


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


class PaddedDataset:
    """Stands for a dataset in workers that start with padding, and passes over that.

    Args:
        dataset: the user's own.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return None if isinstance(index, PaddingIndices) else self.dataset[index]


class PaddedBatches(PaddedDataset):
    """The same for a dataset that gives whole batches; it is not to be asked for one of no samples.

    torch 2.13 utils/data/_utils/fetch.py _MapDatasetFetcher asks for whole batches where it can.
    """

    def __getitems__(self, indices: Any) -> Any:
        return [] if isinstance(indices, PaddingIndices) else self.dataset.__getitems__(indices)


def padded(dataset: Any, *, collates: bool) -> Any:
    """A dataset for workers that start with padding, which the user's own never sees.

    Args:
        dataset: the user's own.
        collates: whether the loader makes batches of samples. Where it asks for them one by one,
            padding is a list of no samples anyway.
    """
    if not collates:
        return PaddedDataset(dataset)
    gives_batches = getattr(dataset, "__getitems__", None) and not isinstance(dataset, MapDataPipe)
    return PaddedBatches(dataset) if gives_batches else dataset


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
        self._reader: StateReader | None = None  # in a worker; it is not to be pickled

    def __call__(self, samples: Any) -> Any:
        info = get_worker_info()
        if info is None:
            return self.collate(samples)
        if self._reader is None:
            self._reader = StateReader()
        if info.id < self.num_padded and not self._padding_seen:
            self._padding_seen = True
            return Padding()
        batch = self.collate(samples)
        return Taped(batch, info.id, WorkerRandomState(self._reader.read(devices=False)))


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
        # torch 2.13 utils/data/_utils/worker.py WorkerInfo: frozen, and made by _worker_loop from
        # the loader's dataset, where user code looks for its own.
        info: Any = get_worker_info()
        if isinstance(info.dataset, PaddedDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(worker_id)
        state = self.states.get(worker_id)
        if state is not None:
            state.restore()
