"""Accelerate: what was prepared and registered is found; the loop is the one of plain PyTorch.

Example:
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    checkpointer = Checkpointer(accelerator, "runs/a", save_every=500)
    for batch in checkpointer.batches(loader, epochs=3):
        with accelerator.accumulate(model):
            loss = train_on(batch)
        checkpointer.step(loss=loss)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from resumekit import Checkpointer as _Checkpointer
from resumekit.capture import REMEDIES
from resumekit.errors import ConfigurationError
from resumekit.frameworks.accelerate_held import Held
from resumekit.frameworks.accelerate_loaders import check_prepared
from resumekit.frameworks.accelerate_states import StatesBeside
from resumekit.frameworks.accelerate_steps import StepsTaken
from resumekit.requirements import require
from resumekit.run import checked_extras, require_order
from resumekit.state import Slot

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.run import OptionKeywords

__all__ = ["Checkpointer"]

require("accelerate")

_REMEDIES = {
    **REMEDIES,
    Slot.MODEL: 'prepare it, or pass extras={{"{name}": {name}}}',
    Slot.OPTIMIZER: "prepare it, or call accelerator.register_for_checkpointing({name})",
    Slot.GRAD_SCALER: 'pass extras={{"{name}": {name}}}',
}


class Accelerator(Protocol):
    """What is read from an ``accelerate.Accelerator`` here; see ``Held`` for the rest."""

    _models: list[torch.nn.Module]
    _dataloaders: list[Any]

    @property
    def sync_gradients(self) -> bool: ...


class Checkpointer(_Checkpointer):
    """A Checkpointer for what an Accelerator has prepared; made after ``prepare``.

    It takes the prepared models, optimizers and schedulers, the gradient scaler, and what was given
    to ``register_for_checkpointing``. One object of a slot is stored under the slot's name, several
    under class and ordinal, e.g. ``model/Linear-0``. ``step()`` is optional: without it, a step is
    counted when every optimizer has taken one.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        directory: the run directory.
        lr_scheduler: schedulers that were neither prepared nor registered: one, or a dict of them.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.run.options.Options``.

    Raises:
        ConfigurationError: nothing was prepared, or in a way that cannot be resumed yet.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: str | Path,
        *,
        lr_scheduler: Any = None,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        require_order(accelerator, directory, call='Checkpointer(accelerator, "runs/a")')
        _check(accelerator)
        self._accelerator = accelerator
        extras = checked_extras(extras)
        held = Held(
            accelerator,
            lr_scheduler=lr_scheduler,
            ema=ema,
            extras=extras,
            drawn=lambda: self._run.position.sources.values(),
        )
        super().__init__(
            directory, components=held.components(), extras=extras, generators=generators, **options
        )
        self._run.loop_check.remedies = _REMEDIES
        self._steps = StepsTaken(accelerator, held.optimizers)
        self._states = StatesBeside(
            accelerator, save=self._save_state, resume_up_to=self._resume_up_to
        )

    def close(self) -> None:
        """Makes a save that is due, and gives the run directory back. Collective, idempotent."""
        super().close()
        self._states.detach()
        self._steps.detach()

    def _save_state(self) -> dict[str, Any] | None:
        """In ``accelerator.save_state``: this step is saved when all of its code has run."""
        if self._loop is None:
            return None
        self.save()
        is_counted = self._stepped or self.finished is not None
        step = self.progress.step if is_counted else self.progress.step + 1
        return {"run_id": self._run.run_id, "step": step}

    def _resume_up_to(self, step_of: Callable[[str], int | None]) -> bool:
        """In ``accelerator.load_state``: whether the run goes on from a checkpoint."""
        if self._run.has_resumed or not self._run.find(up_to=step_of):
            return False
        self.resume()
        return True

    def _check_loader(self, loader: Any, name: str | None) -> None:
        prepared = self._accelerator._dataloaders
        check_prepared(loader, name, prepared=prepared, warns=self._run.world.is_first)

    def _at_step_boundary(self) -> bool:
        """Inside an accumulation window there is none."""
        return self._accelerator.sync_gradients

    def _count_taken_step(self) -> None:
        if self._unsettled and not self._stepped and self._steps.is_complete:
            self.step()
        if self._stepped or not self._unsettled:  # and a resume may have moved a count
            self._steps.forget()


def _check(accelerator: Accelerator) -> None:
    if not accelerator._models:
        raise ConfigurationError(
            "accelerator",
            found="no model was prepared",
            remedy="Make the Checkpointer after accelerator.prepare(model, optimizer, ...)",
        )
