"""The user's objects that a Trainer was given to call."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from torch import nn

# transformers 5.23 trainer.py, trl 1.16 grpo_trainer.py, rloo_trainer.py: what it is given to call.
_CALLED = (
    "compute_loss_func",
    "compute_metrics",
    "preprocess_logits_for_metrics",
    "reward_funcs",
    "rollout_func",
)


def objects_called(trainer: Any) -> dict[str, Any]:
    """The objects that a Trainer was given to call in a step, by name; functions hold nothing.

    Modules, as models of a reward, are attributes of one holder, which stays theirs.

    Args:
        trainer: the ``transformers.Trainer``, or one of a class derived from it.
    """
    found: dict[str, Any] = {}
    modules = SimpleNamespace()
    for name in _CALLED:
        given = getattr(trainer, name, None)
        several = given if isinstance(given, (list, tuple)) else None
        for number, each in enumerate([given] if several is None else several):
            owner = getattr(each, "__self__", each)  # of a method the object whose it is
            own = name if several is None else f"{name}-{number}"
            if isinstance(owner, nn.Module):
                setattr(modules, own, owner)
            elif owner is not trainer and hasattr(owner, "__dict__") and not _is_code(owner):
                found[own] = owner
    return {**found, "called": modules} if vars(modules) else found


def _is_code(given: Any) -> bool:
    return inspect.isroutine(given) or inspect.isclass(given) or inspect.ismodule(given)
