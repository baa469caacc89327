"""Checkpointing for loops that a framework runs."""

# This is a part of the Checkpointer: what it calls there is not the user's.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from resumekit.data import EpochUsage
from resumekit.run.fetch import restore_random
from resumekit.run.loops import Batches, Epochs
from resumekit.run.progress import Progress
from resumekit.run.report import ResumeReport
from resumekit.run.resume import accept_horizon, find
from resumekit.run.step_boundary import StepBoundary
from resumekit.state import CaptureLine


class FrameworkLoop:
    """What an adapter calls from a framework's loop, in this order.

    ``resume()`` once, when every object exists; ``next_epoch()`` and then ``batches(loader)`` for
    each epoch, the rest of the interrupted one first; ``finish()`` when the framework ends.

    Args:
        checkpointer: of the run, whose checkpoint is found here. Collective.
        horizon: how far the run is to go; empty where that is not known yet.
    """

    def __init__(self, checkpointer: StepBoundary, horizon: dict[str, int]) -> None:
        self._checkpointer = checkpointer
        run = checkpointer._run
        run.let_framework_drive()
        find(run)
        self._had_finished = self.finished is not None
        if horizon:
            accept_horizon(run, horizon)
        self._epochs: Epochs | None = None
        self._batches: Batches | None = None

    @property
    def progress(self) -> Progress:
        """Where the run is, or, before ``resume()``, where it will continue."""
        return self._checkpointer.progress

    @property
    def finished(self) -> str | None:
        """Why there is nothing left to train, or None."""
        return self._checkpointer.finished

    @property
    def is_replay(self) -> bool:
        """Whether steps of the run are repeated, by ``resumekit replay``."""
        return self._checkpointer._run.replay is not None

    @property
    def goes_on_after_end(self) -> bool:
        """Whether the run had finished, and is to go further now."""
        return self._had_finished and self.finished is None

    def add_finding(self, finding: Callable[[], Iterable[CaptureLine]]) -> None:
        """Asks for more lines whenever a capture report is made."""
        self._checkpointer._add_finding(finding)

    def set_cadence_text(self, text: str) -> None:
        """Sets when the framework makes saves, in the words of the first message."""
        self._checkpointer._run.reporter.cadence = text

    def saved(self, key: str) -> Any:
        """A component's state in the checkpoint, before ``resume()`` restores it; or None.

        For what has to be made before it can take its state.
        """
        return self._checkpointer._run.saved(key)

    def restore_random(self) -> None:
        """Sets the random state now, and not when the epoch begins. A no-op the second time.

        For a framework that runs code between the position of the checkpoint and that point.
        """
        restore_random(self._checkpointer._run)

    @property
    def step_in_flight(self) -> int | None:
        """Of the save in the background; None without one. The same on all ranks."""
        return self._checkpointer._run.in_flight.step

    def best_so_far(self) -> tuple[Path, int] | None:
        """Directory and step of the best checkpoint, or None. Waits for nothing.

        The save in flight counts; its directory is not there before it is committed.
        """
        best = self._checkpointer._run.best_so_far()
        if best is None:
            return None
        name, _ = best
        return self._checkpointer._run.directory / str(name), name.step

    @property
    def horizon(self) -> dict[str, int]:
        """How far the interrupted run was to go; empty where there was none."""
        return self._checkpointer._run.counters.horizon

    def accept_horizon(
        self, settings: Mapping[str, Any] = MappingProxyType({}), /, **horizon: int
    ) -> None:
        """Takes how far the run is to go, where it was not known yet when the loop was made.

        Args:
            settings: what that follows from, under their keys in the fingerprint of this run.
            **horizon: ``steps``, ``epochs`` or both.

        Raises:
            DriftError: the interrupted run had another horizon.
        """
        accept_horizon(self._checkpointer._run, horizon, settings)

    def under_way(self, loader: Any) -> EpochUsage:
        """The epoch that the run continues in, before anything is restored. Changes nothing.

        For a framework that counts its steps before it begins. After a change of the batch size
        these are batches of the new size.

        Raises:
            DataPositionError: the loader does not fit the position in the checkpoint.
        """
        return self._checkpointer._run.under_way(loader)

    def resume(self) -> ResumeReport:
        """Restores all but the data position and the random state. Collective, idempotent."""
        report = self._checkpointer._resume()
        if self._epochs is None:
            self._checkpointer._begin_loop("epochs")
            self._epochs = Epochs(self._checkpointer, None)
        return report

    def next_epoch(self, loader: Any = None) -> int:
        """Passes the safe point after an epoch, and begins the next one. Collective.

        To be called when all code of the former epoch has run, and nothing of the next one.

        Args:
            loader: that of the next epoch, where it is there already: a new one in each, perhaps.

        Returns:
            The absolute number of the epoch that begins.

        Raises:
            LoopError: the former epoch had no optimizer step.
        """
        assert self._epochs is not None, "resume() comes first"
        self._epochs.next_loader = loader
        return next(self._epochs)

    def batches(self, loader: Any) -> Batches:
        """The batches of this epoch that are still to be used; the framework iterates them.

        Each ``__next__`` is a safe point: the framework must ask for a batch only when all code
        of the step before has run.

        Raises:
            DataPositionError: the loader does not fit the position in the checkpoint.
        """
        self._checkpointer._check_loader(loader, None)
        self._batches = Batches.of_epoch(self._checkpointer, loader)
        return self._batches

    def as_loader(self, loader: Any, *, num_skipped: int = 0) -> DataLoader[Any]:
        """``batches(loader)`` as a DataLoader, for a framework that takes nothing else.

        It fetches nothing ahead, makes nothing of the batches, and draws no random number of the
        run.

        Args:
            loader: the user's loader.
            num_skipped: how many batches the framework takes and drops by itself, because they were
                used before; these are placeholders.
        """
        return _HandingLoader(_HandedDataset(self, loader, num_skipped))

    def finish(self, reason: str) -> None:
        """Records that the framework has ended the run, and saves. Collective, idempotent.

        To be called when all code of the last step has run.
        """
        used_up = self._batches is not None and self._batches.used_up
        self._checkpointer._finish(reason, used_up=used_up)


class _HandedDataset(IterableDataset[Any]):
    """The batches of an epoch, after placeholders for those that were used before."""

    def __init__(self, loop: FrameworkLoop, loader: Any, num_skipped: int) -> None:
        self._loop = loop
        self._loader = loader
        self._num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num_skipped):
            yield None
        yield from self._loop.batches(self._loader)


class _HandingLoader(DataLoader[Any]):
    """A loader that hands its dataset's items over as they are; torch's way would cost a step more.

    A framework that makes a DataLoader of its own from this one's settings gets the same items.
    """

    def __init__(self, dataset: _HandedDataset) -> None:
        super().__init__(
            dataset, batch_size=None, collate_fn=_unchanged, generator=torch.Generator()
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own has a class
        return iter(self.dataset)


def _unchanged(batch: Any) -> Any:
    return batch
