"""What an Accelerator holds after ``prepare`` and ``register_for_checkpointing``, by slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from resumekit.capture import (
    buckets_of,
    by_class_and_ordinal,
    by_key,
    ddp_around,
    one_or_named,
    registered_components,
)
from resumekit.data import Source
from resumekit.frameworks.accelerate import accelerator_components
from resumekit.frameworks.accelerate_loaders import KEY as LOADERS
from resumekit.frameworks.accelerate_loaders import LoadersBeside
from resumekit.frameworks.accelerate_states import AcceleratorCounts
from resumekit.state import SharingPattern, Slot, StateComponent


class Held:
    """The objects that are found, each once, and those that the user gave by name.

    accelerate 1.15 accelerator.py keeps what was prepared in private lists; nothing public gives
    it. Its optimizer.py and scheduler.py wrap: the state is that of the object inside.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        lr_scheduler: schedulers that it may not know: one, or a dict of named ones.
        ema: averaged models: one, or a dict of named ones.
        extras: the user's own values.
        drawn: gives what the loops draw from.

    Attributes:
        optimizers: those inside the wrappers, and the registered ones.
        everything: all that is captured, wrappers too.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        lr_scheduler: Any,
        ema: Any,
        extras: Mapping[str, Any],
        drawn: Callable[[], Collection[Source]],
    ) -> None:
        self._accelerator = accelerator
        self._ema = ema
        self._loaders = LoadersBeside([*accelerator._dataloaders], drawn)
        self.optimizers = [each.optimizer for each in accelerator._optimizers]
        self._schedulers = [each.scheduler for each in accelerator._schedulers]
        self.everything = [
            *accelerator._models,
            *accelerator._optimizers,
            *accelerator._schedulers,
            *self.optimizers,
            *self._schedulers,
            *_by_name(ema).values(),
            *extras.values(),
        ]
        given = {name: each for name, each in _by_name(lr_scheduler).items() if self._take(each)}
        registered = [each for each in accelerator._custom_objects if self._take(each)]
        self._others = [each for each in registered if not self._has_slot(each)]
        self._named = given if isinstance(lr_scheduler, Mapping) else {}
        self._schedulers += () if self._named else given.values()

    def components(self) -> tuple[StateComponent, ...]:
        """All of it, each under the name of its slot, or several under class and ordinal."""
        schedulers = one_or_named(self._schedulers)
        if self._named:
            schedulers = {**by_class_and_ordinal(self._schedulers), **self._named}
        counts, per_rank = AcceleratorCounts(self._accelerator), SharingPattern.PER_RANK
        return (
            *accelerator_components(
                self._accelerator,
                model=one_or_named(self._accelerator._models),
                optimizer=one_or_named(self.optimizers),
                lr_scheduler=schedulers,
                ema=self._ema,
            ),
            *self._gradient_buckets(),
            StateComponent(counts.key, counts, required=False, framework="Accelerate"),
            StateComponent(
                LOADERS, self._loaders, per_rank, required=False, framework="Accelerate"
            ),
            *registered_components(self._others),
        )

    def _gradient_buckets(self) -> Iterator[StateComponent]:
        # accelerate 1.15 accelerator.py prepare_model lists a model before DDP wraps it.
        for key, model in by_key(Slot.MODEL, one_or_named(self._accelerator._models)).items():
            wrapper = ddp_around(model)
            if wrapper is not None:
                yield from buckets_of(wrapper, key=key)

    def _take(self, value: Any) -> bool:
        """Whether nobody has taken it yet."""
        if any(value is each for each in self.everything):
            return False
        self.everything.append(value)
        return True

    def _has_slot(self, registered: Any) -> bool:
        """Puts what was only registered beside what was prepared."""
        kinds: Iterable[tuple[type, list[Any]]] = (
            (torch.optim.Optimizer, self.optimizers),
            (torch.optim.lr_scheduler.LRScheduler, self._schedulers),
        )
        for kind, slot in kinds:
            if isinstance(registered, kind):
                slot.append(registered)
                return True
        return False


def _by_name(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, Mapping) else {} if given is None else {"": given}
