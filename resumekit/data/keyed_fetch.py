"""What gets and collates a batch, in whatever process, with random numbers from its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Subset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory as _pin

from resumekit.data.hidden import held_generators
from resumekit.data.keyed_batches import KeyedBatch
from resumekit.data.keys import Keys, Purpose, kept_generators, seed_generators


class KeyedFetch:
    """Stands where the dataset stands in a loader: gets and collates a batch, from its keys.

    Nothing is drawn that outlasts the batch: this process's own generators are put back.

    Args:
        dataset: the user's own.
        collate: the user's own.
        collates: whether the loader makes batches of samples.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, collates: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self.collates = collates
        self.keys: Keys | None = None
        self.epoch_told = 0
        self._whole_batches = _gives_whole_batches(dataset)
        self._looked = False

    def __getitems__(self, batch: KeyedBatch) -> Any:
        return self._fetch(batch)

    def __getitem__(self, batch: KeyedBatch) -> Any:
        return self._fetch(batch)

    def _fetch(self, batch: KeyedBatch) -> Any:
        in_worker = get_worker_info() is not None
        if in_worker:
            self._tell_epoch(batch.epoch)
        with nullcontext() if in_worker else kept_generators():
            contents = batch.contents()
            samples = self._samples(batch, contents)
            self._enter(Purpose.COLLATE, batch.epoch, b"".join(contents))
            made = self.collate(samples)
        found = self._look() if in_worker else ""
        return Told(made, found) if found else made

    def _samples(self, batch: KeyedBatch, contents: list[bytes]) -> Any:
        if self.collates and self._whole_batches:
            self._enter(Purpose.BATCH, batch.epoch, b"".join(contents))
            return self.dataset.__getitems__(batch.given)
        assert self.keys is not None
        hasher = self.keys.hasher(Purpose.SAMPLE, batch.epoch)
        samples = []
        for index, content in zip(batch, contents, strict=True):
            key = hasher.copy()
            key.update(content)
            seed_generators(key.digest())
            samples.append(self.dataset[index])
        return samples if self.collates else samples[0]

    def _enter(self, purpose: Purpose, epoch: int, content: bytes) -> None:
        assert self.keys is not None
        seed_generators(self.keys.key(purpose, epoch, content))

    def _tell_epoch(self, epoch: int) -> None:
        """Persistent workers hold the dataset as it was when they started."""
        if epoch != self.epoch_told:
            self.epoch_told = epoch
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def _look(self) -> str:
        """What keys do not reach and only this worker can see; asked once, after a batch."""
        if self._looked:
            return ""
        self._looked = True
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch 2.13
            return "random numbers on CUDA devices in workers; draw them in the training loop"
        return out_of_reach(held_generators({"dataset": self.dataset, "collate_fn": self.collate}))


def _gives_whole_batches(dataset: Any) -> bool:
    while type(dataset) is Subset:  # has __getitems__ for those that do, and a loop for the rest
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def out_of_reach(generators: Mapping[str, Any]) -> str:
    """Why these make a run inexact, and what would not; nothing where there are none."""
    if not generators:
        return ""
    return (
        f"no key reaches {', '.join(generators)}; draw from random, numpy.random or torch's "
        "default generator instead"
    )


@dataclass
class Told:
    """A batch, with what its worker found that keys do not reach."""

    batch: Any
    out_of_reach: str

    def pin_memory(self, device: str | None = None) -> Told:
        """The same with its tensors in pinned memory; called by the loader's pinning thread."""
        return Told(_pin(self.batch, device), self.out_of_reach)  # type: ignore[no-untyped-call]


class KeyedInit:
    """The user's ``worker_init_fn``, which finds the user's dataset where it looks for it.

    Args:
        init: the user's own, or None.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init

    def __call__(self, worker_id: int) -> None:
        # torch 2.13 utils/data/_utils/worker.py WorkerInfo: frozen, and made by _worker_loop from
        # the loader's dataset, which is our KeyedFetch.
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(worker_id)
