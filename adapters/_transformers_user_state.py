"""The user state of a Trainer's run: callbacks, the Trainer's class, what it calls, arguments."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

from transformers.trainer_callback import ExportableState

from resumekit.capture import (
    Holder,
    UserState,
    attributes_set_by,
    by_class_and_ordinal,
    trained_parameters,
)
from resumekit.state import Slot

# transformers 5.23 trainer.py, trl 1.16 grpo_trainer.py, rloo_trainer.py: what it is given to call.
_CALLED = (
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "reward_funcs",
    "rollout_func",
)

# What their Trainers keep between two steps is saved by name, or reported as unknown.
_OF_TRAINERS = frozenset({"transformers", "trl"})

# Whose callbacks count nothing that is not saved elsewhere.
_LIBRARIES = frozenset(
    {"transformers", "trl", "peft", "torch", "datasets", "accelerate", "resumekit"}
)

# The adapter's own, and what says how far the run goes.
_NOT_SETTINGS = frozenset({"eval_on_start", "save_total_limit", "max_steps", "num_train_epochs"})

# transformers 5.23 trainer_callback.py TrainerState.compute_steps: made of the arguments.
_INTERVALS = ("logging_steps", "eval_steps", "save_steps")

_CALLBACKS = Slot.CALLBACKS.value


def user_state(
    trainer: Any,
    *,
    without: Any,
    others: Iterable[Any],
    transient: Collection[str],
    limit_bytes: int,
) -> UserState:
    """What callbacks, a class derived from Trainer and the objects that it calls hold.

    Args:
        trainer: the ``transformers.Trainer``.
        without: the callback that has no user state.
        others: what else is saved already.
        transient: see ``Options``.
        limit_bytes: see ``Options.user_state_limit``.
    """
    callbacks = [each for each in trainer.callback_handler.callbacks if each is not without]
    given = list(others)

    def foreign() -> list[Any]:
        optimizer = trainer.optimizer
        own = [trainer.model, trainer.model_wrapped, optimizer, trainer.lr_scheduler]
        inner = [getattr(optimizer, "optimizer", None), trainer.accelerator.scaler]
        of_trainer = [trainer.args, trainer.state, trainer.control]
        return [*own, *inner, *trained_parameters([optimizer]), *of_trainer, *given]

    named = by_class_and_ordinal(callbacks)
    of_class = attributes_set_by(_OF_TRAINERS, type(trainer))
    return UserState(
        {
            "trainer": Holder(trainer, left_out=of_class),
            **{name: _of_callback(each) for name, each in named.items()},
            **_called(trainer),
        },
        key=f"{_CALLBACKS}/attributes",
        foreign=foreign,
        transient=transient,
        limit_bytes=limit_bytes,
    )


def _of_callback(callback: Any) -> Holder:
    exported: Iterable[str] = ()
    if isinstance(callback, ExportableState):
        exported = callback.state()["attributes"]
    package = type(callback).__module__.partition(".")[0]
    return Holder(callback, left_out=frozenset(exported), data_only=package in _LIBRARIES)


def _called(trainer: Any) -> dict[str, Holder]:
    """The objects that a Trainer was given to call in a step, by name; functions hold nothing."""
    found: dict[str, Holder] = {}
    for name in _CALLED:
        given = getattr(trainer, name, None)
        several = given if isinstance(given, (list, tuple)) else None
        for number, each in enumerate([given] if several is None else several):
            owner = getattr(each, "__self__", each)  # of a method its object
            if owner is not trainer and hasattr(owner, "__dict__") and not _is_code(owner):
                found[name if several is None else f"{name}-{number}"] = Holder(owner)
    return found


def _is_code(given: Any) -> bool:
    return inspect.isroutine(given) or inspect.isclass(given) or inspect.ismodule(given)


def changed_settings(trainer: Any) -> UserState:
    """Numbers and switches of the arguments, and intervals, that callbacks change in training.

    Args:
        trainer: the ``transformers.Trainer``, when its state is made.
    """
    kinds = (bool, int, float, type(None))
    names = {name for name, value in vars(trainer.args).items() if type(value) in kinds}
    return UserState(
        {
            "args": Holder(trainer.args, only=names - _NOT_SETTINGS),
            "state": Holder(trainer.state, only=_INTERVALS),
        },
        key=f"{_CALLBACKS}/settings",
    )
