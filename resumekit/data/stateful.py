"""Loaders with a state of their own: torchdata's StatefulDataLoader, and any object like it.

Their own state is used where it is all that a continuation needs. What torchdata 0.11 leaves out:
the random numbers in workers, and those of a dataset without a state, which it replays
from whatever RNG state it finds. Hugging Face ``datasets`` 5.2 leaves out the content of a
shuffle buffer. Those are replayed here, from the RNG state that they began with.

``torchdata.nodes`` saves how many indices its samplers gave, and not what they drew from: their
order is drawn again from the RNG state that the epoch began with. Whether a state restores the next
batch is tried on a copy of the loader, in the first two epochs of a launch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resumekit.capture.rng import RngState
from resumekit.data.iterable import BatchDigest, first_dimension
from resumekit.data.loader_traits import (
    LoaderTraits,
    announce_epoch,
    each_once,
    nested_generators,
    reachable,
    with_state,
)
from resumekit.data.source import Source
from resumekit.errors import DataPositionError
from resumekit.state import Fidelity, Stateful

# The start of the second epoch, and the second batch of the first two.
_NUM_TRIALS = 3
_MANY_BYTES = 2**28  # of tensors, which a copy of a loader has twice
_LARGE_BYTES = 2**20  # an array of that size is shared with the copy, which may not write to it
_END = object()  # in place of a batch


class StatefulSource(Source):
    """A loader with a state of its own, which restores its position.

    Its state is taken at the safe point and given back before the loader is iterated again.
    torchdata's loader is iterated as a shallow copy; any other object is iterated itself.
    """

    kind = "stateful"

    def __init__(self, traits: LoaderTraits, name: str, *, num_trials: int = _NUM_TRIALS) -> None:
        super().__init__(traits, name)
        self._iterated: Any = traits.shallow_copy() if traits.is_torchdata else traits.loader
        self._holder = type(traits.dataset if traits.is_torchdata else traits.loader).__name__
        generators = with_state(nested_generators({"loader": traits.loader}))
        generators = each_once({**self.private, **generators})
        # Threads of nodes draw at any time: their generators are set where an epoch begins only.
        self.private = {} if traits.is_node_loader else generators
        self._rng = RngState(generators)
        self._start: dict[str, Any] | None = None  # the RNG state when the epoch began
        self._ever_begun = False
        self._loaded: Any = None  # the state that was loaded, until the next batch
        self._at_end: dict[str, Any] | None = None  # the same after an epoch's end, until it reads
        self._num_trials = 0 if traits.num_workers else num_trials  # still to come
        self._unused: Any = None  # a copy of the loader as the script made it
        self._expected: str | None = None  # the digest of the next batch, as a resume gives it
        self._unknown = ""

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        workers = self.traits.num_workers
        if workers:
            return Fidelity.UNKNOWN, (
                f"the state_dict() of {self._holder} is not tried with {workers} workers, and may "
                "lack their position or random numbers; with num_workers=0 it is tried"
            )
        if self._unknown:
            return Fidelity.UNKNOWN, self._unknown
        return Fidelity.EXACT, (
            f"as far as the state_dict() of {self._holder} restores it, and as long as it draws "
            "nothing to continue"
        )

    def saved_objects(self) -> tuple[Any, ...]:
        # The loader's state has what a dataset with a state of its own has.
        parts = self.traits.parts.values()
        return (*super().saved_objects(), *(e for e in parts if isinstance(e, Stateful)))

    def begin(self, epoch: int) -> None:
        pending = self._take_pending(epoch)
        is_loaded = pending is not None and pending["loader"] is not None
        # A dataset with a state of its own has its epoch in that: litdata 0.2.76 counts from 1.
        has_epoch = is_loaded and not self.traits.is_torchdata
        has_epoch = has_epoch and isinstance(self.traits.dataset, Stateful)
        announce_epoch(self._iterated, epoch, with_dataset=not has_epoch)
        if not self._ever_begun and (self._num_trials or self.traits.is_node_loader):
            self._keep_unused()
        elif self._num_trials:
            self._expected = self._try_to_resume()
        if pending is not None and is_loaded:
            self._load(pending)
        self._start = self._rng.state_dict()
        self._at_end = self._start if is_loaded and not self.batch else None
        continues_nodes = is_loaded and self.traits.is_node_loader
        self._iterator = (_continued if continues_nodes else iter)(self._iterated)
        self._ever_begun = True

    def _load(self, pending: Mapping[str, Any]) -> None:
        state, start = pending["loader"], pending.get("start")  # older checkpoints lack it
        is_asked = not self.traits.is_torchdata  # which would draw a seed
        if is_asked and not isinstance(state, Mapping):
            self._require_mapping(state)
        # litdata 0.2.76 streaming/dataset.py state_dict writes into it, before the first batch what
        # is wrong.
        self._loaded = copy.deepcopy(state)
        if self.batch:
            if start is not None:
                self._load_rng(start)
            self._iterated.load_state_dict(state)
            return
        before = self._rng.state_dict()
        if self.traits.is_node_loader:
            self._iterated.load_state_dict(self._next_epoch_of(state))
            before.update(generators=(start or before)["generators"])
        else:
            self._iterated.load_state_dict(state)
            # torchdata 0.11 stateful_dataloader.py makes the iterator that ended, and draws a seed
            # for it, when it is first asked. The interrupted run has drawn that one before.
            self._iterated.state_dict()
        self._load_rng(before)

    def _require_mapping(self, state: Any) -> None:
        """Raises DataPositionError unless the loader gives a state as this one, not a dict."""
        if isinstance(self._iterated.state_dict(), Mapping):
            raise DataPositionError(
                f"data: {self.name}: loader",
                found=f"a state of type {type(state).__name__}",
                expected=f"a dict, as the state_dict() of {self._holder} gives it",
            )

    def _next_epoch_of(self, state: Any) -> Any:
        """A node loader's state at the start of the epoch that follows the one of a state."""
        if self._unused is None:
            return state
        loader = _unused_copy(self._unused)  # which draws, perhaps in threads
        loader.load_state_dict(state)
        former = _continued(loader)
        next(former, None)
        iter(loader)
        # Not its state_dict(): torchdata 0.11 nodes/loader.py keeps that of the end.
        start = {former.ROOT_KEY: loader.root.state_dict(), former.NUM_YIELDED_KEY: 0}
        _drop(loader)
        return start

    def next_batch(self) -> Any:
        if self._num_trials and self.batch == 1:
            self._expected = self._try_to_resume()
        batch = self._next_or_end()
        expected, self._expected = self._expected, None
        if expected is not None and expected != self._seen(batch):
            found = "a copy gave another one, or drew other random numbers for it"
            if expected == self._seen(_END) and not self.batch:
                found = "its state at the end of an epoch gives no batch"
            self._unknown = (
                f"the state_dict() of {self._holder} does not restore its next batch: {found}; "
                "save in it all that its order is drawn from"
            )
        if batch is _END:
            raise StopIteration
        self.batch += 1
        self.num_samples = first_dimension(batch)
        return batch

    def _next_or_end(self) -> Any:
        assert self._iterator is not None
        at_end, self._at_end = self._at_end, None
        with _own_seed(self._iterated) if self._begins_late() else nullcontext():
            batch = next(self._iterator, _END)
        self._loaded = None
        if batch is _END and at_end is not None:
            # The end of the former epoch once more, as torchtext 0.8 data/iterator.py gives it.
            self._load_rng(at_end)
            self._iterator = iter(self._iterated)
            batch = next(self._iterator, _END)
        return batch

    def _begins_late(self) -> bool:
        """Whether the iterator begins when the RNG state of a batch of the epoch is set already."""
        is_generator = self.batch and isinstance(self._iterator, GeneratorType)
        return bool(is_generator and self._loaded is not None)

    def _seen(self, batch: Any) -> str:
        """The digest of a batch, and inside an epoch of the RNG state after it."""
        digest = BatchDigest()
        digest.add(batch)
        if self.batch and not self.traits.is_node_loader:  # whose threads draw at any time
            digest.add(RngState().state_dict())
        return digest.hexdigest()

    # ---------------------------------------------------------------- tried on a copy

    def _keep_unused(self) -> None:
        """Keeps a copy of the loader before its first epoch."""
        try:
            self._unused = _unused_copy(self._iterated)
        except Exception as error:  # noqa: BLE001 - the user's objects raise anything
            self._no_trial(error)

    def _try_to_resume(self) -> str | None:
        """The digest of what a resume at this position gives first; None where the trial fails."""
        self._num_trials -= 1
        try:
            unused, self._unused = self._unused, None
            if self._num_trials:
                self._unused = _unused_copy(unused)
            again = StatefulSource(LoaderTraits.of(unused), self.name, num_trials=0)
            return again._first_batch(self._current_state(), self._rng.generators)
        except Exception as error:  # noqa: BLE001 - the user's objects raise anything
            self._no_trial(error)
            return None

    def _first_batch(self, state: Mapping[str, Any], of_others: Mapping[str, Any]) -> str:
        """The digest of its batch at a position; changes none of the others' generators."""
        kept = {id(each) for each in of_others.values()}
        generators = self._rng.generators.items()
        shared = RngState({name: each for name, each in generators if id(each) in kept})
        before = shared.state_dict()
        self.load_state_dict(state)
        try:
            if not self.batch:
                self.restore_generators()
            self.begin(self.epoch)
            if self.batch:  # a resume sets nothing once it has begun a new epoch
                self.restore_generators()
                RngState().load_state_dict({**before, "generators": {}})
            return self._seen(self._next_or_end())
        finally:
            self.close()
            _drop(self._iterated)
            shared.load_state_dict(before)

    def _no_trial(self, error: Exception) -> None:
        self._num_trials, self._unused = 0, None
        self._unknown = (
            f"whether the state_dict() of {self._holder} restores its position was not to be "
            f"tried on a copy: {error!r}"
        )

    def _current_state(self) -> dict[str, Any]:
        # A loader that was never iterated has no position yet, and torchdata's would draw a seed to
        # answer.
        loader_state = self._loaded
        if loader_state is None and self._ever_begun:
            loader_state = self._iterated.state_dict()
        loader_state = copy.deepcopy(loader_state)
        start = self._start if self.batch else None
        if self.traits.is_node_loader and not self.batch:
            start = self._rng.state_dict()
        return {**self._state(), "loader": loader_state, "start": start}


def _continued(loader: Any) -> Any:
    """A node loader's iterator from the state that was loaded, also at the end of an epoch."""
    # torchdata 0.11 nodes/loader.py would read a batch to find out whether to begin another epoch.
    restarts, loader.restart_on_stop_iteration = loader.restart_on_stop_iteration, False
    try:
        return iter(loader)
    finally:
        loader.restart_on_stop_iteration = restarts


@contextmanager
def _own_seed(loader: Any) -> Iterator[None]:
    """Lets torch draw the seed of a DataLoader's iterator from no generator of the run.

    The interrupted run has drawn it when the epoch began: torch 2.13 utils/data/dataloader.py
    _BaseDataLoaderIter.__init__.
    """
    if not isinstance(loader, DataLoader) or loader.generator is not None:
        yield
        return
    loader.generator = torch.Generator()
    try:
        yield
    finally:
        loader.generator = None


def _unused_copy(loader: Any) -> Any:
    """A deep copy of a loader, which shares modules, models and map-style datasets with it.

    Raises:
        ValueError: its tensors are large, or it is not copied.
    """
    memo: dict[int, Any] = {}
    num_bytes = 0
    for _, each in reachable({"loader": loader}):
        is_map_style = isinstance(each, Dataset) and not isinstance(each, IterableDataset)
        if is_map_style or isinstance(each, (torch.nn.Module, ModuleType)):
            memo[id(each)] = each
        elif isinstance(each, np.ndarray) and each.nbytes >= _LARGE_BYTES:
            memo[id(each)] = view = each.view()
            view.flags.writeable = False
        elif isinstance(each, torch.Tensor):
            num_bytes += each.nbytes
    if num_bytes > _MANY_BYTES:
        raise ValueError(f"it holds tensors of {num_bytes >> 20} MiB")
    copied = copy.deepcopy(loader, memo)
    if copied is loader:
        raise ValueError("its copy is the loader itself")
    return copied


def _drop(copied: Any) -> None:
    """Ends the threads of a copy, which would fail where the garbage collector runs in one."""
    getattr(copied, "__dict__", {}).clear()
