"""One training loader and the position in it: begin an epoch, hand out batches, be found again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from resumekit.capture import RngState, generator_state, set_generator_state
from resumekit.contract import Fidelity
from resumekit.data.generators import loader_generators, private_generators, samplers_of
from resumekit.data.sampler import EpochStart, PaddingIndices, RecordingSampler, Seek
from resumekit.data.tape import Padding, Taped, TapingCollate, TapingInit, WorkerRandomState
from resumekit.errors import DataPositionError


class Source(Protocol):
    """What the loops need of a loader.

    ``epoch`` and ``batch`` are the place of the next batch. ``indices`` are the sample indices of
    the last batch (None where the loader does not tell) and ``num_samples`` their number.
    """

    epoch: int
    batch: int
    indices: Any
    num_samples: int

    @property
    def num_batches(self) -> int | None: ...

    @property
    def fidelity(self) -> tuple[Fidelity, str]: ...

    @property
    def begun(self) -> bool: ...

    @property
    def used_up(self) -> bool: ...

    @property
    def name(self) -> str: ...

    def begin(self, epoch: int) -> None: ...

    def next_batch(self) -> Any: ...

    def end_epoch(self) -> None: ...

    def place(self) -> tuple[int, int]: ...

    def close(self) -> None: ...

    def restore_generators(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def open_source(loader: Any, name: str) -> Source:
    """The source of a loader: exact seeking for map-style DataLoaders, replay for the rest."""
    if (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "state_dict")
    ):
        return MapSource(loader, name)
    return ReplaySource(loader, name)


def announce_epoch(loader: Any, epoch: int) -> None:
    """Calls ``set_epoch`` on every sampler and on the dataset that have one, each once."""
    holders = [sampler for _, sampler in samplers_of(loader)]
    holders.append(getattr(loader, "dataset", None))
    for holder in holders:
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class _Position:
    """What the two kinds of source share: the place, the generators, the end of an epoch."""

    kind = ""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name
        self.epoch = 0
        self.batch = 0
        self.indices: Any = None
        self.num_samples = 0
        self._private = loader_generators(loader)
        self._rng = RngState(self._private)  # all that the order may be drawn from
        self._iterator: Iterator[Any] | None = None
        self._pending: dict[str, Any] | None = None  # the place to find when the epoch begins
        self._generators: dict[str, Any] | None = None  # the generators' state at that place

    @property
    def num_batches(self) -> int | None:
        """The batches of one epoch on this rank, or None where the loader does not say."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    @property
    def begun(self) -> bool:
        """Whether an epoch is under way in this process."""
        return self._iterator is not None

    @property
    def used_up(self) -> bool:
        """Whether the epoch under way is known to have no more batches."""
        return self.begun and self.num_batches is not None and self.batch >= self.num_batches

    def end_epoch(self) -> None:
        """Moves the place to the start of the next epoch."""
        self.close()
        self.epoch += 1
        self.batch = 0

    def close(self) -> None:
        """Lets go of the iterator; the place stays."""
        self._iterator = None

    def restore_generators(self) -> None:
        """Sets the private generators to what they were at the checkpoint."""
        if self._generators is not None:
            for name, state in self._generators.items():
                set_generator_state(self._private[name], state)
            self._generators = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the place that a checkpoint holds; it is found when the epoch begins."""
        if state["kind"] != self.kind:
            raise DataPositionError(
                self.name, found=f"a {self.kind} loader", expected=f"a {state['kind']} loader"
            )
        changed = _changes(state["geometry"], self._geometry())
        if changed:
            raise DataPositionError(
                self.name,
                found="; ".join(f"{key} {now!r}" for key, (_, now) in changed.items()),
                expected="; ".join(f"{key} {then!r}" for key, (then, _) in changed.items()),
                remedy="Restore the former settings of this loader",
            )
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._pending = dict(state)
        self._generators = state["generators"]

    def place(self) -> tuple[int, int]:
        """Epoch and batch, the end of an epoch being the start of the next."""
        if self.num_batches and self.batch >= self.num_batches:
            return self.epoch + 1, 0
        return self.epoch, self.batch

    def _geometry(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches, "generators": sorted(self._private)}

    def _state(self) -> dict[str, Any]:
        epoch, batch = self.place()
        return {
            "kind": self.kind,
            "epoch": epoch,
            "batch": batch,
            "geometry": self._geometry(),
            "generators": {name: generator_state(g) for name, g in self._private.items()},
        }


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (then[key], now.get(key)) for key in then if then[key] != now.get(key)}


class MapSource(_Position):
    """A map-style DataLoader. The user's loader is left as it is; a shallow copy is iterated.

    The copy's index sampler is a RecordingSampler. With workers, its collate function and
    ``worker_init_fn`` carry the workers' random states (see ``tape``).
    """

    kind = "map"

    def __init__(self, loader: DataLoader[Any], name: str) -> None:
        super().__init__(loader, name)
        self._collates = loader.batch_sampler is not None
        index_sampler = loader.batch_sampler if self._collates else loader.sampler
        self._sampler = RecordingSampler(index_sampler, self._rng, name)
        self._before: dict[str, Any] | None = None
        self._workers: dict[int, WorkerRandomState] = {}
        self._copy = copy.copy(loader)
        # torch refuses to set these two after construction, because a live iterator would not
        # notice; the copy has none yet.
        self._copy.__dict__["batch_sampler" if self._collates else "sampler"] = self._sampler
        self._copy.__dict__["_iterator"] = None

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """How exactly the position and the random numbers in it come back, and why not."""
        workers = self.loader.num_workers
        if workers and not getattr(self.loader, "in_order", True):
            return Fidelity.LOST, "in_order=False delivers in an order that no record can repeat"
        if workers and not self._collates:
            return Fidelity.LOST, "random numbers in workers of a loader with batch_size=None"
        hidden = private_generators(self.loader.dataset, "dataset.") if workers else {}
        if hidden:
            return Fidelity.LOST, f"{', '.join(hidden)} lives in the workers; use num_workers=0"
        return Fidelity.EXACT, ""

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it where the checkpoint stood."""
        announce_epoch(self.loader, epoch)
        pending, self._pending = self._pending, None
        if pending is not None and pending["epoch"] == epoch:
            self._begin_again(pending)
        else:
            self._begin_fresh()
        self.epoch = epoch

    def _begin_fresh(self) -> None:
        if self._copy._iterator is None:
            self._before = self._rng.state_dict()
            self._workers = {}
            self._attach_tape({}, num_padding=0)
        self.batch = 0
        self._iterator = iter(self._copy)

    def _begin_again(self, pending: Mapping[str, Any]) -> None:
        """Builds the iterator as the interrupted run had it; the generators are set afterwards."""
        self.batch = pending["batch"]
        self._before = pending["before"]
        self._workers = {
            int(worker): WorkerRandomState(**state) for worker, state in pending["workers"].items()
        }
        if self.batch:
            start, num_padding = EpochStart(**pending["start"]), self._num_padding()
        elif self._workers:
            # Persistent workers outlive the epoch: the first iterator of this process draws a seed
            # that the interrupted run's did not draw here.
            start, num_padding = EpochStart(at_iter=self._rng.state_dict()), 0
        else:
            self._begin_fresh()
            return
        eager = self.loader.num_workers == 0
        self._sampler.seek(Seek(start, self.batch, pending["order"], num_padding, eager))
        self._attach_tape(self._workers, num_padding)
        if self._before is not None:
            self._rng.load_state_dict(self._before)
        self._iterator = iter(self._copy)
        self._drop_padding(num_padding)
        self._attach_tape({}, num_padding=0)

    def _drop_padding(self, num_padding: int) -> None:
        # Each padding that is taken out lets the loader ask the sampler for one more batch: after
        # the last one it is as far ahead as it was in the interrupted run.
        assert self._iterator is not None
        for _ in range(num_padding):
            padding, indices = next(self._iterator), self._sampler.drawn.popleft()
            assert isinstance(padding, Padding)
            assert isinstance(indices, PaddingIndices)

    def _num_padding(self) -> int:
        workers = self.loader.num_workers
        return self.batch % workers if workers and self._collates else 0

    def _attach_tape(self, states: dict[int, WorkerRandomState], num_padding: int) -> None:
        """Gives the workers that start next their recorded states."""
        if self.loader.num_workers:
            self._copy.collate_fn = TapingCollate(self.loader.collate_fn, num_padding)
            self._copy.worker_init_fn = TapingInit(self.loader.worker_init_fn, states)

    def next_batch(self) -> Any:
        """The next batch as the user's loader would give it.

        Raises:
            StopIteration: the epoch has no more.
        """
        assert self._iterator is not None
        batch = next(self._iterator)
        self.indices = self._sampler.drawn.popleft()
        self._sampler.order.add(self.indices)
        self.num_samples = len(self.indices) if self._collates else 1
        self.batch += 1
        if isinstance(batch, Taped):
            self._workers[batch.worker] = batch.state
            return batch.batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch and all that is needed to draw from there."""
        if self._pending is not None:
            return dict(self._pending)
        state = self._state()
        under_way = state["batch"] > 0
        persistent = self.loader.num_workers > 0 and self.loader.persistent_workers
        keep_workers = under_way or persistent
        state["start"] = self._sampler.start.as_dict() if under_way else None
        state["order"] = self._sampler.order.hexdigest() if under_way else None
        state["before"] = self._before if keep_workers else None
        state["workers"] = (
            {worker: vars(random) for worker, random in self._workers.items()}
            if keep_workers
            else {}
        )
        return state

    def _geometry(self) -> dict[str, Any]:
        return {
            **super()._geometry(),
            "num_samples": _length(self.loader.dataset),
            "batch_size": self.loader.batch_size,
            "drop_last": self.loader.drop_last,
        }


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


class ReplaySource(_Position):
    """Any other iterable: an epoch is begun again from its random state and drawn through.

    The batches that were used are made once more and dropped, so a resume costs the time they took.
    """

    kind = "replay"

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(loader, name)
        self._start: dict[str, Any] | None = None

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """How exactly the position comes back, and why not."""
        return (
            Fidelity.EQUIVALENT,
            f"{type(self.loader).__name__} is drawn through again from the start of the epoch; "
            "exact only when nothing but its own random numbers shapes it",
        )

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or draws it through up to where the checkpoint stood."""
        announce_epoch(self.loader, epoch)
        pending, self._pending = self._pending, None
        resumed = pending is not None and pending["epoch"] == epoch and pending["batch"] > 0
        if resumed:
            assert pending is not None
            self._rng.load_state_dict(pending["start"])
        self._start = self._rng.state_dict()
        self._iterator = iter(self.loader)
        self.epoch, self.batch = epoch, 0
        if resumed:
            assert pending is not None
            self._draw_through(pending["batch"])

    def _draw_through(self, num_batches: int) -> None:
        for number in range(num_batches):
            try:
                self.next_batch()
            except StopIteration:
                raise DataPositionError(
                    self.name,
                    found=f"an epoch of {number} batches",
                    expected=f"at least the {num_batches} that were already used",
                ) from None

    def next_batch(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: the epoch has no more.
        """
        assert self._iterator is not None
        batch = next(self._iterator)
        self.batch += 1
        self.num_samples = _first_dimension(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch and the random state that the epoch began with."""
        if self._pending is not None:
            return dict(self._pending)
        state = self._state()
        state["start"] = self._start if state["batch"] else None
        return state


def _first_dimension(batch: Any) -> int:
    """The samples in a batch of unknown make: the length of its first tensor, else 1."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    while isinstance(batch, (list, tuple)) and batch:
        batch = batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else 1
