"""The components of a fit: what is trained, callbacks, and user state."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypedDict

from torch.utils.data import Dataset

from resumekit.adapters.lightning import _private as private
from resumekit.adapters.lightning._private import Callback, callbacks, strategies
from resumekit.adapters.lightning.loop_state import LoopState, in_epoch, keeps_gradients
from resumekit.capture.ddp_buckets import buckets_of
from resumekit.capture.gradients import gradient_states, require_gradients
from resumekit.capture.model import by_class_and_ordinal, one_or_named
from resumekit.capture.nested_state import OneNumber
from resumekit.capture.objects import ObjectState
from resumekit.capture.slots import registered_components, state_components
from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.exclusions import attributes_set_by
from resumekit.capture.user_state.user_state import UserState
from resumekit.state import Checked, Rule, SharingPattern, Slot, StateComponent

_HOOKS = f"{Slot.CALLBACKS.value}/hooks"
_LIBRARIES = frozenset({"lightning", "pytorch_lightning", "resumekit"})


def fit_components(
    trainer: Any, loops: LoopState, ema: Any, extras: Mapping[str, Any]
) -> tuple[StateComponent, ...]:
    """The components of a fit.

    Args:
        trainer: the Trainer, with its strategy set up.
        loops: the state of its loops.
        ema: averaged models that the user gave.
        extras: the user's own values, which the core saves.
    """
    averaging = [each for each in trainer.callbacks if isinstance(each, callbacks.WeightAveraging)]
    averages = [*map(private.AVERAGED_MODEL.of, averaging), *([] if ema is None else [ema])]
    ema = one_or_named(averages) if averaging else ema
    schedulers = one_or_named([each.scheduler for each in trainer.lr_scheduler_configs])
    stateful = [each for each in trainer.callbacks if overrides(each, "state_dict")]
    others = [ema, *averages, extras, *extras.values(), *filter(_is_of_library, stateful)]
    user = user_state(trainer, others=others)
    loops.user_state = user
    named = by_class_and_ordinal(stateful).items()
    loops.state_keys = {f"{Slot.CALLBACKS.value}/{name}": e.state_key for name, e in named}
    return (
        *_trained(trainer, schedulers, ema),
        loops.component(),
        StateComponent(_HOOKS, HookState(trainer), SharingPattern.PER_RANK),
        user.component(),
        *map(as_kept, registered_components([*stateful, *filter(None, [trainer.datamodule])])),
    )


def _trained(trainer: Any, schedulers: Any, ema: Any) -> tuple[StateComponent, ...]:
    """What a step changes, sharded or replicated as the strategy does it."""
    if isinstance(trainer.strategy, strategies.DeepSpeedStrategy):
        # Imports DeepSpeed, which has made this engine.
        from resumekit.frameworks.deepspeed import engine_components, require_resumable

        require_resumable(trainer.model)
        return tuple(engine_components(trainer.model, lr_scheduler=schedulers, ema=ema))
    shared = state_components(
        model=trainer.lightning_module,
        optimizer=one_or_named(trainer.optimizers),
        lr_scheduler=schedulers,
        grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
        ema=ema,
        num_ranks=trainer.world_size,
    )
    # Between two steps of one optimizer another one may take some.
    if not keeps_gradients(trainer):
        return (*shared, *buckets_of(trainer.model))
    require_gradients(shared)
    gradients = (each.component() for each in gradient_states(shared, lambda: True))
    return (*shared, *gradients, *buckets_of(trainer.model))


# ---------------------------------------------------------------- the state of callbacks

_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


def overrides(callback: Any, hook: str) -> bool:
    """Whether the callback overrides a hook."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def as_kept(component: StateComponent) -> StateComponent:
    """The component of a callback, with what Lightning's own state of it omits.

    The state of Lightning's own callbacks is for its loop only.
    """
    given = component.stateful.given if isinstance(component.stateful, ObjectState) else None
    if type(given).__module__.startswith(f"{callbacks.__name__}."):
        component = replace(component, framework="Lightning")
    if isinstance(given, callbacks.Timer):
        return replace(component, stateful=TimerState(given, key=component.key))
    if isinstance(given, callbacks.ModelCheckpoint):
        return replace(component, stateful=ModelCheckpointState(given))
    return component


class _Hooks(TypedDict):
    checkpoint: dict[str, Any]


class HookState(Checked):
    """What the module and callbacks put into a checkpoint by hooks."""

    schema = _Hooks

    def __init__(self, trainer: Any) -> None:
        self._module = module = trainer.lightning_module
        hooked = [each for each in trainer.callbacks if overrides(each, "on_save_checkpoint")]
        hooked = [each for each in hooked if not isinstance(each, callbacks.WeightAveraging)]
        self._owners: list[Any] = [*((each, (trainer, module)) for each in hooked), (module, ())]

    def state_dict(self) -> dict[str, Any]:
        checkpoint = {"state_dict": self._module.state_dict()}
        for owner, arguments in self._owners:
            owner.on_save_checkpoint(*arguments, checkpoint)
        return {"checkpoint": {key: v for key, v in checkpoint.items() if key != "state_dict"}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checkpoint = {"state_dict": self._module.state_dict(), **state["checkpoint"]}
        for owner, arguments in self._owners:
            owner.on_load_checkpoint(*arguments, checkpoint)


class TimerState(ObjectState):
    """The state of a ``Timer``, which two equal runs need not have in common."""

    def comparable_state(self) -> dict[str, Any]:
        return {}


class _Saved(TypedDict):
    monitor: str | None
    best_model_score: OneNumber | None
    best_model_path: str
    current_score: OneNumber | None
    dirpath: str | None
    kth_best_model_path: str
    kth_value: OneNumber
    last_model_path: str
    best_k_models: dict[str, OneNumber]


def _has_worst(state: Mapping[str, Any]) -> bool:
    worst = state["kth_best_model_path"]
    return not worst or worst in state["best_k_models"]


def _is_last(last: Mapping[str, Any]) -> bool:
    return [type(last.get(each.name)) for each in private.LAST_SAVED] == [int, str]


class _SavingContent(TypedDict):
    state: Annotated[_Saved, Rule("the worst of the best models among them", _has_worst)]
    last: Annotated[dict[str, Any], Rule("the last step and path", _is_last)]


class ModelCheckpointState(Checked):
    """The state of a ``ModelCheckpoint``, whose folder may have moved with the run directory.

    Lightning compares the folder and drops the best model when it differs. It does not save which
    step it saved last, and would save that step again. lightning 2.6 callbacks/model_checkpoint.py
    ``load_state_dict``, ``_should_skip_saving_checkpoint``.
    """

    schema = _SavingContent

    def __init__(self, saving: Any) -> None:
        self._saving = saving

    def state_dict(self) -> dict[str, Any]:
        saving = self._saving
        state = {key: self._name(value) for key, value in saving.state_dict().items()}
        models = {self._name(path): score for path, score in saving.best_k_models.items()}
        last = {each.name: self._name(each.of(saving)) for each in private.LAST_SAVED}
        return {"state": {**state, "best_k_models": models}, "last": last}

    def check_content(self, key: str, state: Any) -> None:
        saved = state.get("state") if isinstance(state, dict) else None
        if isinstance(saved, dict):  # that of a derived class may have more
            known = saved.keys() & _Saved.__required_keys__
            state = {**state, "state": {name: saved[name] for name in known}}
        super().check_content(key, state)

    def comparable_state(self) -> dict[str, Any]:
        """Without the folders: each launch may have its own, as a logger's next version."""
        saved, name = self.state_dict(), os.path.basename
        state, last = saved["state"], saved["last"].items()
        paths = {key: name(state[key]) for key in _PATHS if key in state}
        models = {name(path): score for path, score in state["best_k_models"].items()}
        return {
            "state": {**state, **paths, "best_k_models": models, "dirpath": None},
            "last": {key: name(value) if isinstance(value, str) else value for key, value in last},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saving, kept = self._saving, state["state"]
        former = kept.get("dirpath") or ""
        paths = {key: self._path(kept[key], former) for key in _PATHS if key in kept}
        models = {self._path(name, former): v for name, v in kept["best_k_models"].items()}
        found = {**kept, **paths, "best_k_models": models, "dirpath": saving.dirpath}
        saving.load_state_dict(found)
        saving.current_score = kept.get("current_score")
        step, path = private.LAST_SAVED
        step.write(saving, state["last"][step.name])
        path.write(saving, self._path(state["last"][path.name], former))

    def _name(self, value: Any) -> Any:
        """A path without the folder; anything else unchanged."""
        folder = f"{self._saving.dirpath}{os.sep}"
        return value.removeprefix(folder) if isinstance(value, str) else value

    def _path(self, name: str, former: str) -> str:
        """Where the file is now: in the folder, or in the former one."""
        here = os.path.join(self._saving.dirpath, name)
        there = os.path.join(former, name)
        return name and (here if os.path.exists(here) or not os.path.exists(there) else there)


# ---------------------------------------------------------------- user state


def user_state(trainer: Any, *, others: Iterable[Any]) -> UserState:
    """The attributes of callbacks and of a data module, beside what their own code saves.

    Args:
        trainer: the Trainer, with its strategy set up.
        others: objects that other components save.
    """
    given, data = list(others), trainer.datamodule

    def foreign() -> list[Any]:
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        optimizers = [*trainer.optimizers, *private.OPTIMIZERS.of(trainer)]
        # The state of datasets is saved with their loaders.
        datasets = [each for each in vars(data or object).values() if isinstance(each, Dataset)]
        models = [trainer.lightning_module, trainer.model]
        return [*models, *optimizers, *schedulers, *trainer.loggers, *datasets, *given]

    named = by_class_and_ordinal(each for each in trainer.callbacks if not _is_of_library(each))
    declared = {name: _declaring(name, each) for name, each in named.items()}
    if data is not None:
        named["datamodule"] = data
        (name,) = by_class_and_ordinal([data])
        declared["datamodule"] = _declaring(name, data)
    holders = {name: _holder(each, declared[name]) for name, each in named.items()}
    state = UserState(holders, key="callbacks/attributes", foreign=foreign)
    state.declared = declared
    return state


def _declaring(name: str, value: Any) -> list[str]:
    """The keys of the components of what a callback's own code says is its state."""
    keys = {"state_dict": f"{Slot.CALLBACKS.value}/{name}", "on_save_checkpoint": _HOOKS}
    return [key for hook, key in keys.items() if _is_overridden(value, hook)]


def _is_overridden(value: Any, name: str) -> bool:
    """Whether a class of the user defines it."""
    owner = next((each for each in type(value).__mro__ if name in vars(each)), Callback)
    return not _is_of_library(owner)


def _is_of_library(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _holder(value: Any, declared: list[str]) -> Holder:
    left_out = attributes_set_by(_LIBRARIES, type(value))
    return Holder(value, left_out=left_out, attributes_only=True, is_trusted=bool(declared))


# ---------------------------------------------------------------- changes of the optimizer


def prepare(
    trainer: Any,
    components: Iterable[StateComponent],
    epoch: int,
    saved: Callable[[str], Any],
) -> None:
    """Gives the optimizer the param groups and the scheduler of the checkpoint.

    Some callbacks change them when an epoch begins, and a resume does not repeat that.

    Args:
        trainer: the Trainer, when all other callbacks have prepared for the fit.
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
            # lightning 2.6 callbacks/finetuning.py on_fit_start recreates the param groups.
            callback.load_state_dict(state)
            callback.on_fit_start(trainer, module)
            for each in components:
                if each.slot == Slot.LR_SCHEDULER.value and saved(each.key) is not None:
                    _set_rates(each.stateful, saved(each.key))
        elif state["scheduler_state"] is not None:
            # lightning 2.6 callbacks/stochastic_weight_avg.py on_train_epoch_start: the first one
            # swaps the scheduler, and averages nothing in an epoch that it has averaged before.
            callback.load_state_dict(state)
            with in_epoch(trainer, min(epoch, int(callback.swa_end))):
                callback.on_train_epoch_start(trainer, module)


def prepare_epoch(trainer: Any) -> None:
    """Repeats what a callback changes for an epoch, when the epoch's loader exists."""
    for _, callback in _changing(trainer):
        is_averaging = isinstance(callback, callbacks.StochasticWeightAveraging)
        if is_averaging and trainer.current_epoch == callback.swa_end + 1:
            # The epoch of the batch norms: no step is saved in it, so it starts again.
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def _set_rates(component: Any, saved: Any) -> None:
    rates = saved["state"].get("_last_lr")
    if rates is not None:
        private.LAST_RATES.write(component.scheduler, list(rates))


def _changing(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The callbacks, with the keys that their components have."""
    for name, callback in by_class_and_ordinal(trainer.callbacks).items():
        if isinstance(callback, (callbacks.BaseFinetuning, callbacks.StochasticWeightAveraging)):
            yield f"callbacks/{name}", callback
