"""What an Accelerator has after ``prepare`` and ``register_for_checkpointing``, by slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from resumekit.adapters.accelerate._private import (
    LOADERS,
    OPTIMIZERS,
    REGISTERED,
    SCHEDULERS,
)
from resumekit.adapters.accelerate.loaders import KEY, OtherLoaders
from resumekit.adapters.accelerate.save_state import AcceleratorCounts
from resumekit.capture.ddp_buckets import buckets_of, ddp_around
from resumekit.capture.model import by_class_and_ordinal, by_key, one_or_named
from resumekit.capture.slots import registered_components
from resumekit.capture.user_state.user_state import UserState
from resumekit.data.source import Source
from resumekit.frameworks.accelerate import MODELS, accelerator_components
from resumekit.state import SharingPattern, Slot, StateComponent


class PreparedObjects:
    """The objects that were prepared, registered, or given by the user; each once.

    accelerate 1.15 optimizer.py and scheduler.py wrap: the state is that of the object inside.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        lr_scheduler: schedulers that it may not know: one, or a dict of named ones.
        ema: averaged models: one, or a dict of named ones.
        extras: the user's own values.
        sources: gives what the loops draw from.

    Attributes:
        optimizers: those inside the wrappers, and the registered ones.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        lr_scheduler: Any,
        ema: Any,
        extras: Mapping[str, Any],
        sources: Callable[[], Collection[Source]],
    ) -> None:
        self._accelerator = accelerator
        self._ema = ema
        self._models = MODELS.of(accelerator)
        self._loaders = OtherLoaders([*LOADERS.of(accelerator)], sources)
        optimizers, schedulers = OPTIMIZERS.of(accelerator), SCHEDULERS.of(accelerator)
        self.optimizers = [each.optimizer for each in optimizers]
        self._schedulers = [each.scheduler for each in schedulers]
        self._taken = [
            *self._models,
            *optimizers,
            *schedulers,
            *self.optimizers,
            *self._schedulers,
            *_by_name(ema).values(),
            *extras.values(),
        ]
        given = {name: each for name, each in _by_name(lr_scheduler).items() if self._take(each)}
        self._others: list[Any] = []
        for each in filter(self._take, REGISTERED.of(accelerator)):
            if isinstance(each, torch.optim.Optimizer):
                self.optimizers.append(each)
            elif isinstance(each, torch.optim.lr_scheduler.LRScheduler):
                self._schedulers.append(each)
            else:
                self._others.append(each)
        self._named = given if isinstance(lr_scheduler, Mapping) else {}
        self._schedulers += () if self._named else given.values()

    def components(self) -> tuple[StateComponent, ...]:
        """All of it, each under the name of its slot, or several under class and ordinal."""
        schedulers = one_or_named(self._schedulers)
        if self._named:
            schedulers = {**by_class_and_ordinal(self._schedulers), **self._named}
        counts, per_rank = AcceleratorCounts(self._accelerator), SharingPattern.PER_RANK
        optional: Any = {"required": False, "framework": "Accelerate"}
        shared = accelerator_components(
            self._accelerator,
            model=one_or_named(self._models),
            optimizer=one_or_named(self.optimizers),
            lr_scheduler=schedulers,
            ema=self._ema,
        )
        registered = registered_components(self._others)
        keys = {id(e): each.key for each in (*shared, *registered) for e in _given(each)}
        given = map(id, REGISTERED.of(self._accelerator))
        counts.registered = [keys[each] for each in given if each in keys]
        return (
            *shared,
            *self._gradient_buckets(),
            StateComponent(counts.key, counts, **optional),
            StateComponent(KEY, self._loaders, per_rank, **optional),
            *registered,
        )

    def _gradient_buckets(self) -> Iterator[StateComponent]:
        # accelerate 1.15 accelerator.py prepare_model lists a model before DDP wraps it.
        for key, model in by_key(Slot.MODEL, one_or_named(self._models)).items():
            wrapper = ddp_around(model)
            if wrapper is not None:
                yield from buckets_of(wrapper, key=key)

    def _take(self, value: Any) -> bool:
        """Whether it was not taken before."""
        if any(value is each for each in self._taken):
            return False
        self._taken.append(value)
        return True


def _given(component: StateComponent) -> Iterator[Any]:
    """The object whose state a component is."""
    is_of_user = isinstance(component.stateful, UserState)
    return islice(() if is_of_user else component.state.live_objects(), 1)


def _by_name(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {} if given is None else {"": given}
