"""RNG states of DataLoader workers: recorded with each batch, restored on a resume."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, MapDataPipe, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as _pin

from resumekit.data.loader_introspection import announce_epoch
from resumekit.data.rng_recording import StateReader, read_states, write_states
from resumekit.errors import DataPositionError


class PaddingIndices(list[int]):
    """An empty index batch that only advances the workers' turn."""


@dataclass
class BatchWithNote:
    """A batch with what the worker that made it has to report."""

    batch: Any
    note: Any

    def pin_memory(self, device: str | None = None) -> BatchWithNote:
        """The same with its tensors in pinned memory; called by the loader's pinning thread."""
        return BatchWithNote(_pin(self.batch, device), self.note)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Padding:
    """The result of an empty index batch; it is dropped."""


class ReplacedDataset:
    """Stands for a dataset in workers.

    Args:
        dataset: of the user.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


class PaddedDataset(ReplacedDataset):
    """For workers that start with padding: returns None for it, without asking the dataset."""

    def __getitem__(self, index: Any) -> Any:
        return None if isinstance(index, PaddingIndices) else self.dataset[index]


class PaddedBatches(PaddedDataset):
    """The same for a dataset that returns whole batches, which must not be asked for an empty one.

    torch 2.13 utils/data/_utils/fetch.py _MapDatasetFetcher asks for whole batches where it can.
    """

    def __getitems__(self, indices: Any) -> Any:
        return [] if isinstance(indices, PaddingIndices) else self.dataset.__getitems__(indices)


def padded(dataset: Any, *, collates: bool) -> Any:
    """A dataset for workers that start with padding, which the user's own never sees.

    Args:
        dataset: of the user.
        collates: whether the loader makes batches of samples. Where it asks for them one by one,
            padding is a list of no samples anyway.
    """
    if not collates:
        return PaddedDataset(dataset)
    gives_batches = getattr(dataset, "__getitems__", None) and not isinstance(dataset, MapDataPipe)
    return PaddedBatches(dataset) if gives_batches else dataset


class RecordingCollate:
    """The user's collate function, with the worker's id and its RNG states next to its result.

    A state is sent when it has changed: with that batch and with as many more as the loader may
    drop, at the start of an epoch for persistent workers. Where nothing is due, the batch goes
    alone.

    Args:
        collate: of the user.
        num_padded: the workers, counted from 0, whose first index batch is empty padding.
        num_ahead: the batches that each worker may be ahead of the loop.
    """

    def __init__(
        self, collate: Callable[[Any], Any], num_padded: int = 0, *, num_ahead: int = 0
    ) -> None:
        self.collate = collate
        self.num_padded = num_padded
        self.num_ahead = num_ahead
        self._padding_seen = False
        self._reader: StateReader | None = None  # in a worker; it is not to be pickled
        self._sent: dict[str, bytes] = {}
        self._num_due: dict[str, int] = {}  # the batches that a state is still to be sent with

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
        states = self._due(self._reader.read(devices=False))
        return BatchWithNote(batch, (info.id, states)) if states else batch

    def _due(self, states: dict[str, bytes]) -> dict[str, bytes]:
        for name, state in states.items():
            if state is not self._sent.get(name):
                self._sent[name], self._num_due[name] = state, self.num_ahead + 1
        due = {name: states[name] for name in states if self._num_due[name]}
        for name in due:
            self._num_due[name] -= 1
        return due


class RestoringInit:
    """The user's ``worker_init_fn``, which finds the user's dataset where it looks for it.

    A worker then continues from its recorded state.

    Args:
        init: of the user, or None.
        states: by worker id; a worker that is not named keeps its ordinary seed.
    """

    def __init__(
        self, init: Callable[[int], Any] | None, states: Mapping[int, Mapping[str, bytes]]
    ) -> None:
        self.init = init
        self.states = states

    def __call__(self, worker_id: int) -> None:
        # torch 2.13 utils/data/_utils/worker.py WorkerInfo: frozen, and made by _worker_loop from
        # the loader's dataset.
        info: Any = get_worker_info()
        if isinstance(info.dataset, ReplacedDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(worker_id)
        write_states(self.states.get(worker_id, {}))


_HEADER = struct.Struct("<qQ")  # how often the worker has begun an epoch; the digest of the rest
_START, _LATEST = range(2)  # the two rows of a worker
# A worker that starts by spawning imports torch before it begins.
_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.001


class SharedStates:
    """RNG states that workers pass to the main process: a table in shared memory, two rows each."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._sizes = {name: len(state) for name, state in read_states(devices=False).items()}
        width = _HEADER.size + sum(self._sizes.values())
        self._memory = torch.zeros((num_workers, 2, width), dtype=torch.uint8)
        self._memory.share_memory_()  # type: ignore[no-untyped-call]  # torch 2.13

    def leave(self, worker: int, row: int, count: int) -> None:
        """Writes the RNG state of this process, a worker's."""
        state = b"".join(read_states(devices=False).values())
        written = _HEADER.pack(count, xxhash.xxh3_64_intdigest(state)) + state
        self._memory[worker, row].numpy()[:] = np.frombuffer(written, dtype=np.uint8)

    def read(self, worker: int, row: int) -> tuple[int, bytes]:
        """The count and the RNG state in a row; the count is 0 while the row is incomplete."""
        written = self._memory[worker, row].numpy().tobytes()
        count, digest = _HEADER.unpack_from(written)
        state = written[_HEADER.size :]
        return (count, state) if digest == xxhash.xxh3_64_intdigest(state) else (0, b"")

    def restore(self, state: bytes) -> None:
        """Sets the RNG state of this process."""
        states, at = {}, 0
        for name, size in self._sizes.items():
            states[name] = state[at : at + size]
            at += size
        write_states(states)


@dataclass
class _Tracked:
    dataset: Any
    board: SharedStates
    count: int = 0  # how often this worker has begun an epoch
    revived: Mapping[int, bytes] | None = None  # what its second epoch begins with, by worker


class TrackedDataset:
    """Stands for a dataset in the workers: is, gives and takes whatever the dataset does."""

    _watch: _Tracked

    def __init__(self, watch: _Tracked) -> None:
        object.__setattr__(self, "_watch", watch)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(object.__getattribute__(self, "_watch").dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_watch").dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._watch.dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._watch.dataset, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return TrackedDataset, (object.__getattribute__(self, "_watch"),)

    def __len__(self) -> int:
        return len(self._watch.dataset)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: the dataset's own __iter__ has to run when the worker asks for it.
        watch, info = self._watch, get_worker_info()
        assert info is not None, "only workers iterate it"
        watch.count += 1
        if watch.count == 2 and watch.revived is not None:
            watch.board.restore(watch.revived[info.id])
        watch.board.leave(info.id, _START, watch.count)
        return _TrackedIterator(iter(watch.dataset), watch, info.id)


class _TrackedIterator:
    def __init__(self, inner: Iterator[Any], watch: _Tracked, worker: int) -> None:
        self._inner = inner
        self._watch = watch
        self._worker = worker

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._inner)
        except StopIteration:
            self._watch.board.leave(self._worker, _LATEST, self._watch.count)
            raise


@dataclass
class _TrackedCollate:
    """The user's collate function; it may draw, also for the last samples of an epoch."""

    collate: Callable[[Any], Any]
    watch: _Tracked

    def __call__(self, samples: Any) -> Any:
        batch, info = self.collate(samples), get_worker_info()
        if info is not None:
            self.watch.board.leave(info.id, _LATEST, self.watch.count)
        return batch


class PersistentWorkers:
    """Follows the persistent workers of a loader over an iterable dataset.

    Args:
        loader: a shallow copy of the user's loader without an iterator; its dataset and its collate
            function are replaced.
        where: the loader's name, for errors.
    """

    def __init__(self, loader: DataLoader[Any], where: str) -> None:
        self._loader = loader
        self._where = where
        self._watch = _Tracked(loader.dataset, SharedStates(loader.num_workers))
        self._birth: dict[str, Any] | None = None
        self._count = 0  # how often the workers were asked to begin
        loader.__dict__["dataset"] = TrackedDataset(self._watch)
        loader.collate_fn = _TrackedCollate(loader.collate_fn, self._watch)

    def begin(self, epoch: int, rng: dict[str, Any]) -> None:
        """An epoch is about to begin, in workers that are started now or continue.

        Args:
            epoch: the epoch.
            rng: the RNG state of this process.
        """
        if self._birth is None:
            self._birth = {"epoch": epoch, "rng": rng}
        self._count += 1

    def restart(self, state: Mapping[str, Any]) -> None:
        """Starts the workers as they were started in the interrupted run.

        They begin, and drop, an epoch from the RNG state and under the epoch's number that the
        first workers had: a dataset may keep what it was then. What they begin next starts from the
        states in the checkpoint. The caller has set the RNG state to ``state["birth"]["rng"]``.
        """
        self._birth = dict(state["birth"])
        self._watch.revived = {int(worker): each for worker, each in state["states"].items()}
        announce_epoch(self._loader, self._birth["epoch"])
        iter(self._loader)
        self._count = 1

    def state_dict(self, *, under_way: bool) -> dict[str, Any]:
        """What the workers of a resumed run are to begin with.

        Args:
            under_way: in the middle of an epoch, which they began from these states; else they have
                ended one, and begin the next from where they are.
        """
        state_of = self._start if under_way else self._rest
        states = {worker: state_of(worker) for worker in range(self._loader.num_workers)}
        return {"birth": self._birth, "states": states}

    def _start(self, worker: int) -> bytes:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            count, state = self._watch.board.read(worker, _START)
            if count == self._count:
                return state
            if time.monotonic() > deadline:
                raise DataPositionError(
                    self._where,
                    found=f"worker {worker} has not begun the epoch",
                    expected=f"its start within {_TIMEOUT_SECONDS:.0f} seconds",
                    remedy="Let the dataset's __iter__ start faster, or pass "
                    "persistent_workers=False",
                )
            time.sleep(_POLL_SECONDS)

    def _rest(self, worker: int) -> bytes:
        return self._watch.board.read(worker, _LATEST)[1]
