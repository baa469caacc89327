"""What Lightning's callbacks and the module keep, and their own hooks leave out or compare."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from resumekit.adapters._lightning_package import Callback, callbacks
from resumekit.capture import ObjectState
from resumekit.state import StateComponent

_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
_OF_THE_LAST_SAVE = ("_last_global_step_saved", "_last_checkpoint_saved")


def overrides(callback: Any, hook: str) -> bool:
    """Whether the callback has a hook of its own."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def as_kept(component: StateComponent) -> StateComponent:
    """The component of a callback, with what Lightning's own state of it leaves out.

    Lightning's own callbacks are for its loop alone.
    """
    given = getattr(component.stateful, "given", None)
    if type(given).__module__.startswith(f"{callbacks.__name__}."):
        component = replace(component, framework="Lightning")
    if isinstance(given, callbacks.Timer):
        return replace(component, stateful=Clock(given, key=component.key))
    if isinstance(given, callbacks.ModelCheckpoint):
        return replace(component, stateful=OwnSaving(given))
    return component


class Hooked:
    """What the module and callbacks put into a checkpoint by hooks."""

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


class Clock(ObjectState):
    """The state of a ``Timer``: the time that the run took goes on with it."""

    def comparable_state(self) -> dict[str, Any]:
        """Two equal runs take different times."""
        return {}


class OwnSaving:
    """The state of a ``ModelCheckpoint``, whose folder may have moved with the run directory.

    Lightning compares the folder and forgets the best when it is another one; and it forgets at
    which step it saved last, so that it would save that step again. lightning 2.6
    callbacks/model_checkpoint.py ``load_state_dict``, ``_should_skip_saving_checkpoint``.
    """

    def __init__(self, saving: Any) -> None:
        self._saving = saving

    def state_dict(self) -> dict[str, Any]:
        saving = self._saving
        state = {key: self._name(value) for key, value in saving.state_dict().items()}
        models = {self._name(path): score for path, score in saving.best_k_models.items()}
        last = {name: self._name(getattr(saving, name)) for name in _OF_THE_LAST_SAVE}
        return {"state": {**state, "best_k_models": models}, "last": last}

    def comparable_state(self) -> dict[str, Any]:
        """The folder is each run's own."""
        state = self.state_dict()
        return {**state, "state": {**state["state"], "dirpath": None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saving, own = self._saving, state["state"]
        former = own.get("dirpath") or ""
        paths = {key: self._path(own[key], former) for key in _PATHS if key in own}
        models = {self._path(name, former): v for name, v in own["best_k_models"].items()}
        found = {**own, **paths, "best_k_models": models, "dirpath": saving.dirpath}
        saving.load_state_dict(found)
        saving.current_score = own.get("current_score")
        saving._last_global_step_saved = state["last"]["_last_global_step_saved"]
        saving._last_checkpoint_saved = self._path(state["last"]["_last_checkpoint_saved"], former)

    def _name(self, value: Any) -> Any:
        """A path below the folder without the folder; anything else as it is."""
        folder = f"{self._saving.dirpath}{os.sep}"
        return value.removeprefix(folder) if isinstance(value, str) else value

    def _path(self, name: str, former: str) -> str:
        """Where the file is now: in the folder, or where it was when the folder was another."""
        here = os.path.join(self._saving.dirpath, name)
        there = os.path.join(former, name)
        return name and (here if os.path.exists(here) or not os.path.exists(there) else there)
