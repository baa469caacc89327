"""What a user's module and callbacks hold in attributes, beside what they declare as state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resumekit.adapters._lightning_package import Callback, LightningModule
from resumekit.capture import HeldState, by_class_and_ordinal

KEY = "callbacks/held"

_MODULE = "module"
_OF_LIGHTNING = ("lightning", "pytorch_lightning", "resumekit")
_HYPERPARAMETERS = ("_hparams", "_hparams_initial")


def of_user_code(trainer: Any) -> dict[str, Any]:
    """The module and the callbacks that a user wrote and that declare no state, by name."""
    plain = [each for each in trainer.callbacks if _is_of_user(each) and not _declares(each)]
    named = {**by_class_and_ordinal(plain), _MODULE: trainer.lightning_module}
    return {name: _Attributes(each) for name, each in named.items()}


def held_by_user_code(trainer: Any, *, others: Iterable[Any]) -> HeldState:
    """What they hold from now on: outputs of steps in a list, tensors, objects with a state.

    Args:
        trainer: the Trainer, with its strategy set up.
        others: what else is saved already.
    """
    given = list(others)

    def foreign() -> list[Any]:
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        optimizers = [*trainer.optimizers, *trainer.strategy._lightning_optimizers]
        beside = [trainer, trainer.datamodule, *trainer.callbacks, *trainer.loggers]
        return [trainer.lightning_module, trainer.model, *optimizers, *schedulers, *beside, *given]

    holders = of_user_code(trainer)
    of_lightning = frozenset({*vars(LightningModule()), *_HYPERPARAMETERS})
    left_out = {**dict.fromkeys(holders, frozenset[str]()), _MODULE: of_lightning}
    return HeldState(holders, key=KEY, foreign=foreign, left_out=left_out)


class _Attributes:
    """The attributes of an object, without its own state, which is empty or saved elsewhere."""

    def __init__(self, of: Any) -> None:
        self.__dict__ = vars(of)


def _is_of_user(callback: Any) -> bool:
    """Whether no class of Lightning's stands between it and ``Callback``."""
    classes = [each for each in type(callback).__mro__ if issubclass(each, Callback)]
    return not any(each.__module__.partition(".")[0] in _OF_LIGHTNING for each in classes[:-1])


def _declares(callback: Any) -> bool:
    return type(callback).state_dict is not Callback.state_dict
