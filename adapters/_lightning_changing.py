"""Callbacks that change the optimizer or the module when an epoch begins.

No resume repeats what they did, so the live objects are brought into that form before their state
is restored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from resumekit.adapters._lightning_package import callbacks
from resumekit.state import Slot, StateComponent


def prepare(
    trainer: Any,
    components: Iterable[StateComponent],
    epoch: int,
    saved: Callable[[str], Any],
) -> None:
    """Gives the optimizer the param groups and the scheduler that the checkpoint's had.

    Args:
        trainer: the Trainer, when all callbacks but ours have prepared for the fit.
        components: of the run.
        epoch: the epoch that the run continues in.
        saved: gives a component's state in the checkpoint by its key, or None.
    """
    module = trainer.lightning_module
    for key, callback in _changing(trainer):
        component = saved(key)
        if component is None:
            continue
        state = copy.deepcopy(component["opaque"])
        if isinstance(callback, callbacks.BaseFinetuning):
            # lightning 2.6 callbacks/finetuning.py on_fit_start makes the param groups anew.
            callback.load_state_dict(state)
            callback.on_fit_start(trainer, module)
            for each in components:
                if each.slot == Slot.LR_SCHEDULER.value and saved(each.key) is not None:
                    _see_groups(each.stateful, saved(each.key))
        elif state["scheduler_state"] is not None:
            # lightning 2.6 callbacks/stochastic_weight_avg.py on_train_epoch_start: the first one
            # swaps the scheduler, and averages nothing in an epoch that it has averaged before.
            callback.load_state_dict(state)
            with _in_epoch(trainer, min(epoch, int(callback.swa_end))):
                callback.on_train_epoch_start(trainer, module)


def prepare_epoch(trainer: Any) -> None:
    """Repeats what the interrupted epoch was changed into, when its loader is there."""
    for _, callback in _changing(trainer):
        is_averaging = isinstance(callback, callbacks.StochasticWeightAveraging)
        if is_averaging and trainer.current_epoch == callback.swa_end + 1:
            # The epoch of the batch norms: no step is saved in it, so it is begun anew.
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def forget_groups(trainer: Any) -> None:
    """The param groups of the checkpoint are those of this fit, and of no later one."""
    for _, callback in _changing(trainer):
        if isinstance(callback, callbacks.BaseFinetuning):
            callback._restarting = False


def _see_groups(component: Any, saved: Any) -> None:
    # torch 2.13 optim/lr_scheduler.py: one rate for each group that there was at its last step.
    rates = saved["state"].get("_last_lr")
    if rates is not None:
        component.scheduler._last_lr = list(rates)


def _changing(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The callbacks, with the keys that their components have."""
    seen: dict[str, int] = {}
    for callback in trainer.callbacks:
        name = type(callback).__name__
        number = seen.setdefault(name, 0)
        seen[name] += 1
        if isinstance(callback, (callbacks.BaseFinetuning, callbacks.StochasticWeightAveraging)):
            yield f"callbacks/{name}-{number}", callback


@contextmanager
def _in_epoch(trainer: Any, epoch: int) -> Iterator[None]:
    progress = trainer.fit_loop.epoch_progress.current
    now, progress.completed = progress.completed, epoch
    yield
    progress.completed = now
