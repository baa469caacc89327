"""Persistent workers of an iterable dataset: the random state that each began its epoch with.

Their random numbers carry over from one epoch to the next, past the fetch that ended the epoch, of
which nothing comes back. So each worker leaves its state in shared memory, when its dataset begins
an epoch and after whatever it draws at the end of one.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, get_worker_info

from resumekit.data.source import announce_epoch
from resumekit.data.states import read_states, write_states
from resumekit.errors import DataPositionError

_HEADER = struct.Struct("<qQ")  # how often the worker has begun an epoch; the digest of the rest
_START, _REST = range(2)  # the two rows of a worker

# A worker that starts by spawning imports torch before it begins.
_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.001


class Board:
    """What the workers leave for the main process: a table in shared memory, two rows for each."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._sizes = {name: len(state) for name, state in read_states(devices=False).items()}
        width = _HEADER.size + sum(self._sizes.values())
        self._memory = torch.zeros((num_workers, 2, width), dtype=torch.uint8)
        self._memory.share_memory_()  # type: ignore[no-untyped-call]  # torch 2.13

    def leave(self, worker: int, row: int, count: int) -> None:
        """Writes the random state of this process, a worker's."""
        state = b"".join(read_states(devices=False).values())
        written = _HEADER.pack(count, xxhash.xxh3_64_intdigest(state)) + state
        self._memory[worker, row].numpy()[:] = np.frombuffer(written, dtype=np.uint8)

    def read(self, worker: int, row: int) -> tuple[int, bytes]:
        """What stands in the row; a count of 0 where nothing does, or not all of it yet."""
        written = self._memory[worker, row].numpy().tobytes()
        count, digest = _HEADER.unpack_from(written)
        state = written[_HEADER.size :]
        return (count, state) if digest == xxhash.xxh3_64_intdigest(state) else (0, b"")

    def restore(self, state: bytes) -> None:
        """Sets the random state of this process."""
        states, at = {}, 0
        for name, size in self._sizes.items():
            states[name] = state[at : at + size]
            at += size
        write_states(states)


@dataclass
class _Watch:
    dataset: Any
    board: Board
    count: int = 0  # how often this worker has begun an epoch
    revived: Mapping[int, bytes] | None = None  # what its second epoch begins with, by worker


class WatchedDataset:
    """Stands for a dataset in the workers: is, gives and takes whatever the dataset does."""

    _watch: _Watch

    def __init__(self, watch: _Watch) -> None:
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
        return WatchedDataset, (object.__getattribute__(self, "_watch"),)

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
        return _WatchedIterator(iter(watch.dataset), watch, info.id)


class _WatchedIterator:
    def __init__(self, inner: Iterator[Any], watch: _Watch, worker: int) -> None:
        self._inner = inner
        self._watch = watch
        self._worker = worker

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._inner)
        except StopIteration:
            self._watch.board.leave(self._worker, _REST, self._watch.count)
            raise


@dataclass
class _WatchedCollate:
    """The user's collate function; it may draw, also for the last samples of an epoch."""

    collate: Callable[[Any], Any]
    watch: _Watch

    def __call__(self, samples: Any) -> Any:
        batch, info = self.collate(samples), get_worker_info()
        if info is not None:
            self.watch.board.leave(info.id, _REST, self.watch.count)
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
        self._watch = _Watch(loader.dataset, Board(loader.num_workers))
        self._birth: dict[str, Any] | None = None
        self._count = 0  # how often the workers were told to begin
        loader.__dict__["dataset"] = WatchedDataset(self._watch)
        loader.collate_fn = _WatchedCollate(loader.collate_fn, self._watch)

    def begin(self, epoch: int, rng: dict[str, Any]) -> None:
        """An epoch is about to begin, in workers that are started now or go on.

        Args:
            epoch: the epoch.
            rng: the random state of this process.
        """
        if self._birth is None:
            self._birth = {"epoch": epoch, "rng": rng}
        self._count += 1

    def begin_again(self, state: Mapping[str, Any]) -> None:
        """Starts the workers as they were started in the interrupted run.

        They begin, and drop, an epoch from the random state and under the epoch's number that the
        first workers had: a dataset may keep what it was then. What they begin next starts from the
        states in the checkpoint. The caller has set the random state to ``state["birth"]["rng"]``.
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
        states: dict[int, bytes] = {}
        for worker in range(self._loader.num_workers):
            states[worker] = self._start(worker) if under_way else self._rest(worker)
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
                    expected=f"within {_TIMEOUT_SECONDS:.0f} seconds",
                )
            time.sleep(_POLL_SECONDS)

    def _rest(self, worker: int) -> bytes:
        return self._watch.board.read(worker, _REST)[1]
