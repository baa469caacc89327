"""What an Accelerator has after ``prepare`` and ``register_for_checkpointing``, by slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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


def prepared_components(
    accelerator: Any,
    *,
    lr_scheduler: Any,
    ema: Any,
    extras: Mapping[str, Any],
    sources: Callable[[], Collection[Source]],
) -> tuple[StateComponent, ...]:
    """The objects that were prepared, registered, or given by the user; each once.

    Each is under the name of its slot, or several under class and ordinal. accelerate 1.15
    optimizer.py and scheduler.py wrap: the state is that of the object inside.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        lr_scheduler: schedulers that it may not know: one, or a dict of named ones.
        ema: averaged models: one, or a dict of named ones.
        extras: the user's own values.
        sources: gives what the loops draw from.
    """
    models, objects = MODELS.of(accelerator), REGISTERED.of(accelerator)
    wrappers = [*OPTIMIZERS.of(accelerator), *SCHEDULERS.of(accelerator)]
    optimizers = [each.optimizer for each in OPTIMIZERS.of(accelerator)]
    schedulers = [each.scheduler for each in SCHEDULERS.of(accelerator)]
    of_user = [*_by_name(ema).values(), *extras.values()]
    taken = set(map(id, [*models, *wrappers, *optimizers, *schedulers, *of_user]))

    def is_new(value: Any) -> bool:
        is_taken = id(value) in taken
        taken.add(id(value))
        return not is_taken

    given = {name: each for name, each in _by_name(lr_scheduler).items() if is_new(each)}
    others: list[Any] = []
    for each in filter(is_new, objects):
        if isinstance(each, torch.optim.Optimizer):
            optimizers.append(each)
        elif isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            schedulers.append(each)
        else:
            others.append(each)
    if given and isinstance(lr_scheduler, Mapping):
        named = {**by_class_and_ordinal(schedulers), **given}
    else:
        named = one_or_named([*schedulers, *given.values()])
    shared = accelerator_components(
        accelerator,
        model=one_or_named(models),
        optimizer=one_or_named(optimizers),
        lr_scheduler=named,
        ema=ema,
    )
    registered = registered_components(others)
    keys = {id(e): each.key for each in (*shared, *registered) for e in _given(each)}
    counts, loaders = AcceleratorCounts(accelerator), [*LOADERS.of(accelerator)]
    counts.registered = [keys[id(each)] for each in objects if id(each) in keys]
    optional: Any = {"required": False, "framework": "Accelerate"}
    per_rank = SharingPattern.PER_RANK
    return (
        *shared,
        *_gradient_buckets(models),
        StateComponent(counts.key, counts, **optional),
        StateComponent(KEY, OtherLoaders(loaders, sources), per_rank, **optional),
        *registered,
    )


def _gradient_buckets(models: Sequence[Any]) -> Iterator[StateComponent]:
    # accelerate 1.15 accelerator.py prepare_model lists a model before DDP wraps it.
    for key, model in by_key(Slot.MODEL, one_or_named(models)).items():
        wrapper = ddp_around(model)
        if wrapper is not None:
            yield from buckets_of(wrapper, key=key)


def _given(component: StateComponent) -> Iterator[Any]:
    """The object whose state a component is."""
    is_of_user = isinstance(component.stateful, UserState)
    return islice(() if is_of_user else component.state.live_objects(), 1)


def _by_name(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {} if given is None else {"": given}
