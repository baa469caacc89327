"""User state of a Trainer's run: of callbacks, the Trainer's class, its arguments, and of TRL."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from transformers.trainer_callback import ExportableState

from resumekit.adapters.transformers import _private as private
from resumekit.adapters.transformers._private import trl_classes
from resumekit.capture.model import by_class_and_ordinal
from resumekit.capture.nested_state import Restorer, require_fields
from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.exclusions import attributes_set_by, trained_parameters
from resumekit.capture.user_state.user_state import UserState
from resumekit.state import (
    ComponentState,
    Resplit,
    SharingPattern,
    Slot,
    StateComponent,
    WorldChange,
)

# What their Trainers keep between two steps is saved by name, or reported as unknown.
_OF_TRAINERS = frozenset({"transformers", "trl"})

# Packages whose callbacks have no state that is not saved elsewhere.
_LIBRARIES = frozenset(
    {"transformers", "trl", "peft", "torch", "datasets", "accelerate", "resumekit"}
)

# Settings of the adapter, and the horizon.
_NOT_SETTINGS = frozenset({"eval_on_start", "save_total_limit", "max_steps", "num_train_epochs"})

_CALLBACKS = Slot.CALLBACKS.value


def user_state(trainer: Any, *, without: Any, others: Iterable[Any]) -> UserState:
    """The user state of callbacks, of a class derived from Trainer, and of what it calls.

    Args:
        trainer: the ``transformers.Trainer``.
        without: the callback that has no user state.
        others: objects that other components save.
    """
    callbacks = [each for each in trainer.callback_handler.callbacks if each is not without]
    given = list(others)

    def foreign() -> list[Any]:
        optimizer = trainer.optimizer
        trained = [trainer.model, trainer.model_wrapped, optimizer, trainer.lr_scheduler]
        inner = [getattr(optimizer, "optimizer", None), trainer.accelerator.scaler]
        of_trainer = [trainer.args, trainer.state, trainer.control]
        return [*trained, *inner, *trained_parameters([optimizer]), *of_trainer, *given]

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
    )


def _of_callback(callback: Any) -> Holder:
    exported: Iterable[str] = ()
    if isinstance(callback, ExportableState):
        exported = callback.state()["attributes"]
    package = type(callback).__module__.partition(".")[0]
    return Holder(callback, left_out=frozenset(exported), data_only=package in _LIBRARIES)


def _called(trainer: Any) -> dict[str, Holder]:
    """The objects and functions that a Trainer was given to call in a step, by name."""
    found: dict[str, Holder] = {}
    for name in private.CALLED:
        given = getattr(trainer, name, None)
        several = given if isinstance(given, (list, tuple)) else None
        for number, each in enumerate([given] if several is None else several):
            called = each.func if isinstance(each, partial) else each
            owner = getattr(called, "__self__", called)  # of a method its object
            if owner is not trainer and hasattr(owner, "__dict__") and not _is_code(owner):
                found[name if several is None else f"{name}-{number}"] = Holder(owner)
    return found


def _is_code(given: Any) -> bool:
    return inspect.isbuiltin(given) or inspect.isclass(given) or inspect.ismodule(given)


def changed_settings(trainer: Any) -> UserState:
    """Numbers and flags of the arguments, intervals, and attributes that callbacks add to these.

    Args:
        trainer: the ``transformers.Trainer`` when its state exists.
    """
    kinds = (bool, int, float, type(None))
    names = {name for name, value in vars(trainer.args).items() if type(value) in kinds}
    kept = {"args": names - _NOT_SETTINGS, "state": private.INTERVALS}
    holders = {
        name: Holder(getattr(trainer, name), left_out=vars(getattr(trainer, name)).keys() - each)
        for name, each in kept.items()
    }
    return UserState(holders, key=f"{_CALLBACKS}/settings")


# ---------------------------------------------------------------- TRL's Trainers

# What the size of a generated batch depends on.
_GEOMETRY = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
)


def trl_components(trainer: Any, *, key: str, framework: str) -> Iterator[StateComponent]:
    """The state of a TRL Trainer without its sums; nothing for any other one.

    Args:
        trainer: the ``transformers.Trainer``.
        key: of the component.
        framework: whose loop needs it.
    """
    state, per_rank = TrlState(trainer, key=key), SharingPattern.PER_RANK
    if state.names:
        yield StateComponent(key, state, per_rank, required=False, framework=framework)


def lost_of_trl(trainer: Any) -> str:
    """Why a TRL Trainer cannot be resumed exactly, or nothing."""
    names = [each.__name__ for each in trl_classes(trainer)]
    unknown = [name for name in names if name.removesuffix("Trainer") not in private.TRL_TRAINERS]
    if unknown:
        return f"what trl's {unknown[0]} keeps from step to step is not known here"
    if getattr(trainer, "use_vllm", False):
        return "vLLM draws its completions from random numbers of its own; use use_vllm=False"
    if getattr(trainer, "environments", None):
        return "the environments that completions act in are not saved; use none"
    if _logs_pictures(trainer):
        return "the log of completions has pictures, which are not saved; log_completions=False"
    return ""


def _logs_pictures(trainer: Any) -> bool:
    return bool(getattr(trainer, "log_completions", False) and private.TRL_HAS_IMAGES.of(trainer))


_NEW_ONES = "the next step generates new ones"


class TrlState(ComponentState):
    """Completions that were generated and not used yet, counts, and what controls a loss.

    Args:
        trainer: of TRL's.
        key: the component's key, for errors.
    """

    def __init__(self, trainer: Any, *, key: str) -> None:
        self._trainer = trainer
        self.key = key
        entropy = private.TRL_ENTROPY if getattr(trainer, "use_adaptive_entropy", False) else ()
        is_table = getattr(trainer, "log_completions", False) and not _logs_pictures(trainer)
        logs = (private.TRL_LOGS,) if is_table else ()
        possible = (private.TRL_STORED, private.TRL_STEP, private.TRL_GENERATED, *entropy, *logs)
        self._live = {each.name: each for each in possible if hasattr(trainer, each.name)}

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes that this Trainer has."""
        return tuple(self._live)

    def state_dict(self) -> dict[str, Any]:
        """The live values, in plain dicts and lists."""
        state = {name: _plain(each.of(self._trainer)) for name, each in self._live.items()}
        return {**state, "geometry": self._geometry()}

    def _geometry(self) -> dict[str, int]:
        args = self._trainer.args
        return {name: getattr(args, name) for name in _GEOMETRY if hasattr(args, name)}

    def check_state_dict(self, state: Any) -> None:
        require_fields(self.key, state, {"geometry": dict, **dict.fromkeys(self.names, object)})

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores every value in place, so that containers keep their type and maximum length."""
        device = self._trainer.accelerator.device
        restore = Restorer()
        for name, each in self._live.items():
            live, saved = each.of(self._trainer), state[name]
            if isinstance(live, dict):
                _fill(live, restore(None, saved))
            else:
                made = restore(None, saved, lambda tensor: tensor.detach().to(device, copy=True))
                each.write(self._trainer, made)
        buffered = private.TRL_GENERATED.of(self._trainer)
        if buffered is None or state["geometry"] == self._geometry():
            return ()
        private.TRL_GENERATED.write(self._trainer, None)
        return (f"the batches that were generated are split in another way now; {_NEW_ONES}",)

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """Rank 0's counts; completions of the former ranks are not used."""
        state = dict(states[change.model_rank])
        if state.get(private.TRL_GENERATED.name) is None:
            return state, ()
        message = f"the batches that were generated were those of the former ranks; {_NEW_ONES}"
        return {**state, private.TRL_GENERATED.name: None}, (message,)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, deque)):
        return [_plain(each) for each in value]
    return value


def _fill(live: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Restores dicts that may be defaultdicts, and lists that may be deques, in place."""
    for key in [each for each in live if each not in saved]:
        del live[key]
    for key, value in saved.items():
        if isinstance(value, dict):
            _fill(live[key], value)
        elif isinstance(value, list):
            live[key].clear()
            live[key].extend(value)
        else:
            live[key] = value


def without_times(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """``_metrics`` without what is read from a clock. trl 1.16 grpo_trainer.py training_step."""
    return {
        mode: {name: values for name, values in each.items() if name != "step_time"}
        for mode, each in metrics.items()
    }
