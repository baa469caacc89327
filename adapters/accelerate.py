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

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from resumekit import Checkpointer as _Checkpointer
from resumekit.capture import one_or_named, registered_components
from resumekit.contract import StateComponent
from resumekit.errors import ConfigurationError
from resumekit.frameworks.accelerate import accelerator_components
from resumekit.frameworks.accelerate_states import AcceleratorCounts, StatesBeside
from resumekit.requirements import require

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.engine.options import OptionKeywords

__all__ = ["Checkpointer"]

require("accelerate")


class Accelerator(Protocol):
    """What is read from an ``accelerate.Accelerator`` (1.15 accelerator.py).

    The lists are private: nothing public gives what was prepared. A test pins them.
    """

    _models: list[torch.nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _custom_objects: list[Any]
    scaler: Any
    step: int

    @property
    def distributed_type(self) -> Any: ...

    @property
    def num_processes(self) -> int: ...

    @property
    def sync_gradients(self) -> bool: ...


class Checkpointer(_Checkpointer):
    """A Checkpointer for what an Accelerator has prepared; made after ``prepare``.

    It takes the prepared models, optimizers and schedulers, the gradient scaler, and what was given
    to ``register_for_checkpointing``. One object of a slot is stored under the slot's name, several
    under class and ordinal, e.g. ``model/Linear-0``.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.engine.options.Options``.

    Raises:
        ConfigurationError: nothing was prepared, or in a way that cannot be resumed yet.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: str | Path,
        *,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        _check(accelerator)
        self._accelerator = accelerator
        named = [*(ema.values() if isinstance(ema, Mapping) else [ema]), *(extras or {}).values()]
        super().__init__(
            directory,
            components=_components(accelerator, ema=ema, named=named),
            extras=extras,
            generators=generators,
            **options,
        )

        self._states = StatesBeside(
            accelerator, save=self._save_state, resume_up_to=self._resume_up_to
        )

    def close(self) -> None:
        """Makes a save that is due, and gives the run directory back. Collective, idempotent."""
        super().close()
        self._states.detach()

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

    def _at_step_boundary(self) -> bool:
        """Inside an accumulation window there is none."""
        return self._accelerator.sync_gradients


def _check(accelerator: Accelerator) -> None:
    if not accelerator._models:
        raise ConfigurationError(
            "accelerator",
            found="no model was prepared",
            remedy="Make the Checkpointer after accelerator.prepare(model, optimizer, ...)",
        )


def _components(
    accelerator: Accelerator, *, ema: Any, named: Iterable[Any]
) -> tuple[StateComponent, ...]:
    """All that the accelerator holds; what the user gave by name is not taken twice."""
    prepared = [*accelerator._models, *accelerator._optimizers, *accelerator._schedulers]
    # accelerate 1.15 optimizer.py and scheduler.py wrap: the state is that of the object inside.
    optimizers = [each.optimizer for each in accelerator._optimizers]
    schedulers = [each.scheduler for each in accelerator._schedulers]
    taken = {id(each) for each in (*named, *prepared, *optimizers, *schedulers)}
    others: list[Any] = []
    for each in accelerator._custom_objects:
        if id(each) in taken:
            continue
        if isinstance(each, torch.optim.Optimizer):
            optimizers.append(each)
        elif isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            schedulers.append(each)
        else:
            others.append(each)
    components = accelerator_components(
        accelerator,
        model=one_or_named(accelerator._models),
        optimizer=one_or_named(optimizers),
        lr_scheduler=one_or_named(schedulers),
        ema=ema,
    )
    counts = AcceleratorCounts(accelerator)
    return (*components, StateComponent(counts.key, counts), *registered_components(others))
