"""Any other iterable: drawn through again up to the place where the run was interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from resumekit.contract import Fidelity
from resumekit.data.source import Source, announce_epoch
from resumekit.errors import DataPositionError


class ReplaySource(Source):
    """Any other iterable: an epoch is begun again from its random state and drawn through.

    The batches that were used are made once more and dropped, so a resume costs the time they took.
    """

    kind = "replay"

    def __init__(self, loader: Any, name: str) -> None:
        super().__init__(loader, name)
        self._start: dict[str, Any] | None = None

    @property
    def num_batches(self) -> int | None:
        """The batches of one epoch, or None: the length of an iterable dataset is only a guess."""
        is_guess = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        return None if is_guess else super().num_batches

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
