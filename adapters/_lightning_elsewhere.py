"""The counts of Lightning's loops in a run that was begun under another framework."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from resumekit import Progress


def counted(
    loops: Mapping[str, Any], place: Progress, *, begun: int, optimizers: int
) -> dict[str, Any]:
    """The state of the loops, as if they had come to this place by themselves.

    lightning 2.6 loops/progress.py; of a loop that has run nothing the counts are zeros.

    Args:
        loops: the state of loops that have run nothing.
        place: where the run is.
        begun: the epochs that were begun, the one under way among them.
        optimizers: how many of them step in each step.
    """
    found = copy.deepcopy(dict(loops))
    steps = place.step * optimizers
    epochs = {"ready": begun, "started": begun, "processed": place.epoch, "completed": place.epoch}
    found["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
    batches = found["epoch_loop.batch_progress"]
    _count(batches["total"], place.micro_step)
    _count(batches["current"], place.batch)
    _count(found["epoch_loop.scheduler_progress"]["total"], place.step)
    automatic = found["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for each in (automatic["step"], automatic["zero_grad"]):
        _count(each["total"], steps)
    _count(found["epoch_loop.manual_optimization.optim_step_progress"]["total"], steps)
    found["epoch_loop.state_dict"]["_batches_that_stepped"] = place.step
    return found


def _count(counts: dict[str, int], number: int) -> None:
    counts.update(dict.fromkeys(counts, number))
