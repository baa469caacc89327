"""Counts the optimizer steps of a loop that does not call ``step()``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any
from weakref import WeakSet, finalize

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from resumekit.capture.objects import ScalerState
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.user_state.exclusions import trained_parameters
from resumekit.errors import ResumekitError
from resumekit.log import logger
from resumekit.state import StateComponent


class StepsTaken:
    """Whether optimizers have taken a step since the last one that was counted.

    Args:
        needs_all: a step is complete when each optimizer has taken one, instead of any of them.
        engine: counts its steps in ``global_steps``; optimizers are then not watched.
    """

    def __init__(self, *, needs_all: bool = False, engine: Any = None) -> None:
        self._needs_all = needs_all
        self._engine = engine
        self._watched: list[Any] = []
        self._scalers: list[Any] = []
        self._hooks: list[Any] = []
        self._trained: set[int] = set()  # ids of the parameters that the watched optimizers train
        self.forget()

    def watch(self, components: Iterable[StateComponent]) -> None:
        """Watches the optimizers and the gradient scalers of a run, each once.

        A step of an optimizer inside another one counts as the outer one's, that of one which
        trains the same parameters, as in a second phase, as a step of any. A step that a scaler
        skips is one too, unless all optimizers have to step.
        """
        for state in (each.stateful for each in components):
            if isinstance(state, OptimizerState) and self._engine is None:
                self._watch_optimizer(state.optimizer)
            if isinstance(state, ScalerState) and not _is_in(state.scaler, self._scalers):
                self._scalers.append(state.scaler)
                self._updates.append(_last_update(state.scaler))
        if self._watched and not self._trained:
            _hook_all_optimizers()
            _RUNS.add(self)
        self._trained = {id(each) for each in trained_parameters(self._watched)}

    def _watch_optimizer(self, optimizer: Any) -> None:
        if _is_in(optimizer, self._watched):
            return
        note = partial(self._note, len(self._watched))
        self._watched.append(optimizer)
        self._has_stepped.append(False)
        for each in (optimizer, *inner_optimizers(optimizer)):
            # A wrapper that never called Optimizer.__init__ has no hooks.
            if "_optimizer_step_post_hooks" in getattr(each, "__dict__", ()):
                self._hooks.append(each.register_step_post_hook(note))

    @property
    def is_complete(self) -> bool:
        """Whether a step was taken since ``forget``."""
        if self._engine is not None:
            return bool(self._engine.global_steps > self._num_of_engine)
        if self._needs_all:
            return bool(self._has_stepped) and all(self._has_stepped)
        now = map(_last_update, self._scalers)
        has_updated = (new is not old for new, old in zip(now, self._updates, strict=True))
        return self._other_has_stepped or any(self._has_stepped) or any(has_updated)

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients to step with: a loop that only collects data has none."""
        trained = trained_parameters(self._watched)
        return self._engine is not None or any(each.grad is not None for each in trained)

    def forget(self) -> None:
        """The steps taken so far are counted."""
        self._has_stepped, self._other_has_stepped = [False] * len(self._watched), False
        self._updates = [*map(_last_update, self._scalers)]
        self._num_of_engine = 0 if self._engine is None else self._engine.global_steps

    def detach(self) -> None:
        """Removes the hooks from the optimizers."""
        _RUNS.discard(self)
        for hook in self._hooks:
            hook.remove()

    def _note(self, number: int, *_: Any) -> None:
        self._has_stepped[number] = True

    def note_other(self, optimizer: Any) -> None:
        """An optimizer has stepped; it counts where it trains what a watched one trains."""
        trained = trained_parameters([optimizer])
        if not self._other_has_stepped and any(id(each) in self._trained for each in trained):
            self._other_has_stepped = True


_RUNS: WeakSet[StepsTaken] = WeakSet()
CAUGHT: list[str] = []  # errors of loops, until a loop gives a batch


@cache
def _hook_all_optimizers() -> None:
    """Adds a hook that runs after each step of any optimizer in this process.

    It is never removed: a run may be collected while torch goes over the hooks.
    """
    register_optimizer_step_post_hook(_note_other)


def report_if_caught(error: ResumekitError) -> None:
    """Logs an error that is raised if it is gone when an optimizer steps: training runs on."""
    _hook_all_optimizers()
    finalize(error, CAUGHT.append, str(error)).atexit = False


def _note_other(optimizer: Any, *_: Any) -> None:
    while CAUGHT:
        message = "the program caught an error and trains on, nothing is saved: %s"
        logger.error(message, CAUGHT.pop())
    for each in [*_RUNS]:
        each.note_other(optimizer)


def inner_optimizers(optimizer: Any) -> list[Optimizer]:
    """The optimizers that another one holds as attributes, e.g. ``SAM.base_optimizer``."""
    values = list(getattr(optimizer, "__dict__", {}).values())
    nested = [each for value in values if isinstance(value, (list, tuple)) for each in value]
    return [each for each in (*values, *nested) if isinstance(each, Optimizer)]


def _last_update(scaler: Any) -> Any:
    """Another object after each ``scaler.update()``; reading it needs no device."""
    # torch 2.13 amp/grad_scaler.py GradScaler.update: makes a new dict. It has no hooks.
    return getattr(scaler, "_per_optimizer_states", None)


def _is_in(value: Any, values: Iterable[Any]) -> bool:
    return any(value is each for each in values)
