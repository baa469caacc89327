"""Keyed randomness: each sample and each collation draws from a key of its own.

What a sample draws depends on the run's seed, the loader, the epoch and the sample's index; not on
the worker that makes it, on what was prefetched, or on where the run was interrupted. So workers
have no state to restore, and a resumed run may have another number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, MapDataPipe

from resumekit.data.generators import DATASET_PREFIXES, without_prefetch
from resumekit.data.hidden import held_generators
from resumekit.data.keyed_batches import KeyedSampler
from resumekit.data.keyed_fetch import KeyedFetch, KeyedInit, Told, out_of_reach
from resumekit.data.keys import Keys, Purpose, RunSeed
from resumekit.data.map_source import MapSource, Mark
from resumekit.data.sampler import EpochStart
from resumekit.data.stateful import StatefulMapSource
from resumekit.errors import ConfigurationError
from resumekit.state import Fidelity


class KeyedSource(MapSource):
    """A map-style DataLoader whose samples draw from keys, in whatever worker they are made.

    Args:
        loader: the user's loader; it is left as it is.
        name: what the run calls it.
        seed: the run's, known when the first epoch begins.

    Raises:
        ConfigurationError: the dataset is a pipe, which torch changes when an epoch begins.
    """

    kind = "keyed"
    keyed = True
    _sampler: KeyedSampler

    def __init__(self, loader: DataLoader[Any], name: str, seed: RunSeed) -> None:
        if isinstance(loader.dataset, MapDataPipe):
            raise ConfigurationError(
                f"batches(name={name!r})",
                found="a MapDataPipe and randomness='keyed'",
                expected="a map-style Dataset",
                remedy="Pass randomness='tape'",
            )
        super().__init__(loader, name)
        self._seed = seed
        self._fetch = KeyedFetch(loader.dataset, loader.collate_fn, collates=self._collates)
        self._copy.__dict__["dataset"] = self._fetch
        self._copy.collate_fn = _as_it_is
        if loader.num_workers:
            self._copy.worker_init_fn = KeyedInit(loader.worker_init_fn)
        self._order_drawn_again = False
        self._told = ""  # what a worker found

    def _new_sampler(self, *recording: Any) -> KeyedSampler:
        return KeyedSampler(self.loader, *recording)

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """How exactly the position and the random numbers in it come back, and why not."""
        if self.loader.num_workers and not getattr(self.loader, "in_order", True):
            return Fidelity.LOST, "in_order=False delivers in an order that no record can repeat"
        held = held_generators({"dataset": self._fetch.dataset, "collate_fn": self._fetch.collate})
        if not self.loader.num_workers:
            # A checkpoint holds those of this process that are known to it.
            saved = {id(each) for each in (*self._private.values(), *self._seed.saved_generators)}
            held = {name: each for name, each in held.items() if id(each) not in saved}
        reason = self._told or out_of_reach(held)
        if reason:
            return Fidelity.LOST, reason
        if self._sampler.tape is not None and not self._sampler.tape.is_empty:
            return Fidelity.EQUIVALENT, (
                "the sampler draws from a global generator as it goes, further ahead for more "
                "workers: exact for as many as before; draw the whole order when the epoch begins"
            )
        return Fidelity.EXACT, ""

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it where the checkpoint stood."""
        assert self._seed.value is not None
        keys = Keys(self._seed.value, self.name)
        self._fetch.keys, self._fetch.epoch_told = keys, epoch
        self._sampler.begin(epoch)
        self._order_drawn_again = False
        # What the loader seeds its workers from. Persistent ones start in whatever epoch this
        # process begins with.
        self._copy.generator = keys.generator(
            Purpose.WORKERS, 0 if self.loader.persistent_workers else epoch
        )
        super().begin(epoch)

    def next_batch(self) -> Any:
        """The next batch as the user's loader would give it.

        Raises:
            StopIteration: the epoch has no more.
        """
        batch = super().next_batch()
        if isinstance(batch, Told):
            self._told = batch.out_of_reach
            return batch.batch
        return batch

    def state_at(self, mark: Mark) -> dict[str, Any]:
        """The place of a batch and the random state that its epoch's order is drawn from."""
        return {**super().state_at(mark), "num_workers": None, "before": None, "workers": {}}

    def comparable_state(self) -> dict[str, Any]:
        """What two equal runs have in common: the state, without how far ahead workers are."""
        return without_prefetch(self.state_dict())

    def drawn_again(self) -> tuple[Any, ...]:
        """The private generators that are in place already: the order was drawn from them again."""
        # How far a sampler has drawn depends on what is prefetched, so that the state in the
        # checkpoint is that of other workers.
        if not self._order_drawn_again:
            return ()
        return tuple(
            generator
            for name, generator in self._private.items()
            if not name.startswith(DATASET_PREFIXES)
        )

    def _start_again(self, pending: Mapping[str, Any]) -> EpochStart:
        start = super()._start_again(pending)
        self._order_drawn_again = start.at_first is not None
        return start

    def _num_padding(self) -> int:
        return 0

    def _attach_tape(self, states: Any, num_padding: int) -> None:
        """There is none."""


class KeyedStatefulMapSource(KeyedSource, StatefulMapSource):
    """The same for torchdata's StatefulDataLoader."""


def _as_it_is(batch: Any) -> Any:
    return batch
