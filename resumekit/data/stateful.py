"""Loaders with a state of their own: torchdata's StatefulDataLoader, and any object like it.

Their own state is used where it is all that a continuation needs. What torchdata 0.11 leaves out:
the random numbers in workers, and those of a dataset without a state, which it replays
from whatever RNG state it finds. Hugging Face ``datasets`` 5.2 leaves out the content of a
shuffle buffer. Those are replayed here, from the RNG state that they began with.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import IterableDataset

from resumekit.data.iterable import first_dimension
from resumekit.data.loader_introspection import (
    INNER,
    announce_epoch,
    has_own_state,
    is_hugging_face,
    is_stateful_data_loader,
    shallow_copy,
)
from resumekit.data.source import Source
from resumekit.state import Fidelity


class StatefulSource(Source):
    """A loader with a state of its own, which restores its position.

    Its state is taken at the safe point and given back before the loader is iterated again.
    torchdata's loader is iterated as a shallow copy; any other object is iterated itself.
    """

    kind = "stateful"

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(loader, name)
        is_torchdata = is_stateful_data_loader(loader)
        self._iterated: Any = shallow_copy(loader) if is_torchdata else loader
        self._holder = type(loader.dataset if is_torchdata else loader).__name__
        self._ever_begun = False

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        workers = getattr(self.loader, "num_workers", 0)
        if workers:
            return Fidelity.EQUIVALENT, (
                f"the state_dict() of {self._holder} may lack the random numbers of its {workers} "
                "workers; with num_workers=0 it need not have them"
            )
        return Fidelity.EXACT, (
            f"as far as the state_dict() of {self._holder} restores it, and as long as it draws "
            "nothing to continue"
        )

    def begin(self, epoch: int) -> None:
        announce_epoch(self._iterated, epoch)
        pending = self._take_pending(epoch)
        if pending is not None and pending["loader"] is not None:
            self._load(pending["loader"])
        self._iterator = iter(self._iterated)
        self._ever_begun = True

    def _load(self, state: Any) -> None:
        current = self._rng.state_dict()
        self._iterated.load_state_dict(state)
        if self.batch == 0:
            # torchdata 0.11 stateful_dataloader.py makes the iterator that ended, and draws a seed
            # for it, when it is first asked. The interrupted run has drawn that one before.
            self._iterated.state_dict()
        self._rng.load_state_dict(current)

    def next_batch(self) -> Any:
        assert self._iterator is not None
        batch = next(self._iterator)
        self.batch += 1
        self.num_samples = first_dimension(batch)
        return batch

    def _current_state(self) -> dict[str, Any]:
        # A loader that was never iterated has no position yet, and torchdata's would draw a seed to
        # answer.
        loader_state = copy.deepcopy(self._iterated.state_dict()) if self._ever_begun else None
        return {**self._state(), "loader": loader_state}


def restores_itself(loader: Any) -> bool:
    """Whether a loader claims that its ``state_dict`` restores its position exactly."""
    if hasattr(loader, INNER) or not has_own_state(loader) or is_hugging_face(loader):
        return False
    if not is_stateful_data_loader(loader):
        return True
    dataset = loader.dataset
    return (
        isinstance(dataset, IterableDataset)
        and loader.num_workers == 0
        and has_own_state(dataset)
        and not is_hugging_face(dataset)
    )
