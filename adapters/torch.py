"""Plain PyTorch: one process, DDP, FSDP2, tensor parallel, any loop that you write yourself.

Example:
    checkpointer = Checkpointer("runs/a", save_every=500)
    for batch in checkpointer.batches(loader, epochs=3):  # instead of: for batch in loader
        train_on(batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from resumekit import Checkpointer as _Checkpointer
from resumekit.capture.slots import state_components
from resumekit.run.discovery import Discovery
from resumekit.run.steps_taken import StepsTaken
from resumekit.state import Slot

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.run.options import OptionKeywords

__all__ = ["Checkpointer"]


class Checkpointer(_Checkpointer):
    """A Checkpointer for a loop of your own; the same code for one process and for many.

    Example::

        checkpointer = Checkpointer("runs/a", save_every=500)
        for batch in checkpointer.batches(loader, epochs=3):
            train_on(batch)

    What is not passed is found when the loop is entered, or ``resume()`` is called: optimizers, the
    models that they train, their schedulers, gradient scalers and averages, in the variables of the
    functions that run the loop and in what these reach. One object of a slot is stored under the
    slot's name, several under those of their variables, e.g. ``model/generator``. Pass what has to
    be restored earlier, e.g. before DDP, ``torch.compile`` or code that warms it up, and call
    ``resume()`` there.

    ``step()`` is optional: without it, an iteration in which an optimizer of the run has taken a
    step, or a gradient scaler has skipped it, is a step. ``step(loss=loss)`` also records the loss.

    A model whose parameters are DTensors (``fully_shard``, ``parallelize_module``) is saved
    sharded: every rank writes its own shard, and any other layout or number of ranks can load it.

    Every slot takes one object, or a dict of objects whose keys are their names.

    Args:
        directory: the run directory.
        model: the module, wrapped (DDP, ``torch.compile``) or not; names are wrapper-free. Shard
            it before it is passed here.
        optimizer: any ``torch.optim.Optimizer``.
        lr_scheduler: any scheduler with ``state_dict``.
        grad_scaler: a ``torch.amp.GradScaler``.
        ema: an ``AveragedModel``, or any object with ``state_dict``.
        extras: a live dict of your own values.
        generators: private random generators by name.
        stage_group: where the model is one stage of a pipeline, the ranks that hold this stage
            together: a process group, a one-dimensional DeviceMesh, or their global ranks. The
            stages' parameters have the names that they have in the whole model.
        data_parallel_group: the ranks that take different data, this one among them, in the same
            forms; by default all. Ranks of one tensor-parallel group or pipeline take the same.
        **options: see ``resumekit.run.options.Options``.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        lr_scheduler: Any = None,
        grad_scaler: Any = None,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        stage_group: Any = None,
        data_parallel_group: Any = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        given = {
            Slot.MODEL: model,
            Slot.OPTIMIZER: optimizer,
            Slot.LR_SCHEDULER: lr_scheduler,
            Slot.GRAD_SCALER: grad_scaler,
            Slot.EMA: ema,
        }
        make = partial(state_components, num_ranks=_num_ranks(), stage_group=stage_group)
        super().__init__(
            directory,
            components=make(**{slot.value: each for slot, each in given.items()}),
            extras=extras,
            generators=generators,
            data_parallel_group=data_parallel_group,
            **options,
        )
        left_out = [*(extras or {}).values(), *(generators or {}).values()]
        transient = self._run.options.transient
        # What the loop uses is found when the run resumes: no framework has a list of it.
        self._run.discovery = Discovery(self, given, make, left_out=left_out, transient=transient)
        self._loop.steps_taken = StepsTaken()


def _num_ranks() -> int:
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_distributed else 1
