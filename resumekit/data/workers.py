"""RNG states of a process and of its workers: recorded with each batch, restored on a resume."""

from __future__ import annotations

import random
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, MapDataPipe, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as _pin

from resumekit.capture.global_rng import (
    PYTHON_WORDS,
    NumpyState,
    PythonState,
    read_devices,
    set_device_state,
)
from resumekit.data.loader_traits import announce_epoch
from resumekit.errors import DataPositionError

# random.Random: 624 words and a position, then half of a pair of normal numbers, if there is one.
_PYTHON = struct.Struct("<2500s?d")
_PYTHON_VERSION = 3
# The twister's key, then its position, and half of a pair of normal numbers, if there is one.
_NUMPY = struct.Struct("<2496sqqd")
_TWISTER = "MT19937"
# A device, and the index of the current device, which older checkpoints do not have: "cuda:1@1".
_DEVICE = re.compile(r"(\w+):(\d+)(?:@(\d+))?", re.ASCII)


class StateReader:
    """Reads the state of each global generator of this process; draws nothing."""

    def __init__(self) -> None:
        self._python, self._numpy = PythonState(), NumpyState()
        self._read: tuple[Any, Any] = (None, None)  # of Python and NumPy, as read last
        self._host: dict[str, bytes] = {}  # the same as bytes
        self._torch = b""

    def read(self, *, devices: bool = True) -> dict[str, bytes]:
        """The states, by name; of a generator that drew nothing the same object as before.

        Args:
            devices: whether those of an accelerator are among them, once it is in use.
        """
        python, numpy = self._python.read(), self._numpy.read()
        if python is not self._read[0]:
            self._host["python"] = _pack_python(python)
        if numpy is not self._read[1]:
            self._host.pop("numpy", None)
            if numpy["bit_generator"] == _TWISTER:  # a user may have replaced it
                self._host["numpy"] = _pack_numpy(numpy)
        self._read = (python, numpy)
        state = torch.default_generator.get_state().numpy().tobytes()
        if state != self._torch:
            self._torch = state
        states = {**self._host, "torch": self._torch}
        found = read_devices() if devices else None
        if found is not None:
            for index, each in enumerate(found.states):
                states[f"{found.kind}:{index}@{found.current}"] = each.numpy().tobytes()
        return states


def read_states(*, devices: bool = True) -> dict[str, bytes]:
    """The state of each global generator of this process, by name; see ``StateReader.read``."""
    return StateReader().read(devices=devices)


def write_states(states: Mapping[str, bytes]) -> None:
    """Sets the generators that are named; leaves the others as they are.

    The states of devices that are not here are left out: the component ``rng`` reports them.
    """
    for name, state in states.items():
        if name == "python":
            words, has_half, half = _PYTHON.unpack(state)
            half = half if has_half else None
            random.setstate((_PYTHON_VERSION, PYTHON_WORDS.unpack(words), half))
        elif name == "numpy":
            key, *rest = _NUMPY.unpack(state)
            np.random.set_state((_TWISTER, np.frombuffer(key, dtype=np.uint32).copy(), *rest))
        elif name == "torch":
            torch.default_generator.set_state(_tensor(state))
        elif device := _DEVICE.fullmatch(name):
            kind, index, then = device.groups()
            set_device_state(kind, int(index), int(then) if then else None, _tensor(state))


def _pack_python(state: Mapping[str, Any]) -> bytes:
    half = state["gauss_next"]
    return _PYTHON.pack(state["words"], half is not None, half or 0.0)


def _pack_numpy(state: Mapping[str, Any]) -> bytes:
    inner = state["state"]
    return _NUMPY.pack(inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


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
            capacity = max(16, 2 * self._num)
            self._batches = np.resize(self._batches, capacity)
            self._states = np.resize(self._states, (capacity, len(state)))
        self._batches[self._num] = number
        self._states[self._num] = np.frombuffer(state, dtype=np.uint8)
        self._num += 1

    def as_arrays(self) -> dict[str, Any]:
        return {"batches": self._batches[: self._num], "states": self._states[: self._num]}


class FetchRecorder:
    """Records the RNG state that a fetch draws from, and sets it when the epoch is fetched again.

    A state is recorded only where drawing again would not lead to it.

    Attributes:
        overflowed: whose states took more than ``MAX_BYTES``; empty while they do not. The records
            of this epoch are then given up.
    """

    def __init__(self) -> None:
        self.overflowed = ""
        self._reader = StateReader()
        self._records: dict[str, _Records] = {}
        self._played: dict[int, dict[str, bytes]] = {}  # states of the interrupted run, by fetch
        self._reached: dict[str, bytes] = {}  # where drawing again would be now
        self._before: dict[str, bytes] = {}
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether drawing again leads to every batch of this epoch so far."""
        return not (self._records or self.overflowed)

    def begin(self, recorded: Mapping[str, Any] | None = None) -> None:
        """The epoch's iterator was just made.

        Args:
            recorded: what ``state_dict`` gave in the interrupted epoch, to fetch the same again.
        """
        self.overflowed, self._num_bytes = "", 0
        self._records, self._played = {}, {}
        for name, records in (recorded or {}).items():
            for number, state in zip(records["batches"].tolist(), records["states"], strict=True):
                self._played.setdefault(number, {})[name] = state.tobytes()
        self._reached = self._reader.read()

    def before(self, number: int) -> None:
        """The batch of this number in the epoch is about to be fetched."""
        if self._played:
            write_states(self._played.pop(number, {}))
        self._before = self._reader.read()

    def after(self, number: int) -> None:
        """It was fetched."""
        for name, state in self._reader.read().items():
            before = self._before.get(name)
            if state == before:
                continue
            if before is not None and before != self._reached.get(name):
                self._record(name, number, before)
            self._reached[name] = state

    def fetches(self, items: Iterator[Any], first: int = 0) -> Iterator[Any]:
        """The items of an iterator, each of them a fetch; the first one has this number."""
        for number in count(first):
            self.before(number)
            try:
                item = next(items)
            except StopIteration:
                return
            self.after(number)
            yield item

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


# ---------------------------------------------------------------- the workers of a loader


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
        return _tracked(iter(watch.dataset), watch, info.id)


def _tracked(items: Iterator[Any], watch: _Tracked, worker: int) -> Iterator[Any]:
    """The items; at their end the worker leaves its RNG state."""
    yield from items
    watch.board.leave(worker, _LATEST, watch.count)


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
