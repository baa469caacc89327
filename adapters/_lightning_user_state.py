"""The user state of a fit: what callbacks and a data module hold in attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset

from resumekit.adapters._lightning_callbacks import overrides
from resumekit.adapters._lightning_package import Callback
from resumekit.capture import Holder, UserState, attributes_set_by, by_class_and_ordinal

_LIBRARIES = frozenset({"lightning", "pytorch_lightning", "resumekit"})


def user_state(trainer: Any, *, others: Iterable[Any]) -> UserState:
    """What user code keeps beside the module, where it declares no state of its own.

    Args:
        trainer: the Trainer, with its strategy set up.
        others: what else is saved already.
    """
    given, data = list(others), trainer.datamodule

    def foreign() -> list[Any]:
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        optimizers = [*trainer.optimizers, *trainer.strategy._lightning_optimizers]
        # The state of datasets is saved with their loaders.
        datasets = [each for each in vars(data or object).values() if isinstance(each, Dataset)]
        models = [trainer.lightning_module, trainer.model]
        return [*models, *optimizers, *schedulers, *trainer.loggers, *datasets, *given]

    callbacks = [each for each in trainer.callbacks if not _declares_state(each)]
    holders = {name: _holder(each) for name, each in by_class_and_ordinal(callbacks).items()}
    if data is not None and not _is_overridden(data, "state_dict"):
        holders["datamodule"] = _holder(data)
    return UserState(holders, key="callbacks/attributes", foreign=foreign)


def _declares_state(callback: Any) -> bool:
    """Whether its own code says what its state is, or it is Lightning's."""
    if _is_of_library(type(callback)):
        return True
    own = ("state_dict", "on_save_checkpoint")
    return any(overrides(callback, hook) and _is_overridden(callback, hook) for hook in own)


def _is_overridden(value: Any, name: str) -> bool:
    """Whether a class of the user's defines it."""
    owner = next((each for each in type(value).__mro__ if name in vars(each)), Callback)
    return not _is_of_library(owner)


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _holder(value: Any) -> Holder:
    left_out = attributes_set_by(_LIBRARIES, type(value))
    return Holder(value, left_out=left_out, attributes_only=True)
