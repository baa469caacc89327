"""Accelerate: what was prepared and registered is found; the loop is the one of plain PyTorch.

Example:
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    checkpointer = Checkpointer(accelerator, "runs/a", save_every=500)
    for batch in checkpointer.batches(loader, epochs=3):
        with accelerator.accumulate(model):
            loss = train_on(batch)
        checkpointer.step(loss=loss)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from resumekit import Checkpointer as _Checkpointer
from resumekit.capture import EmaState, rank_buffer_components, state_components, unwrapped
from resumekit.contract import SharingPattern, Slot, StateComponent
from resumekit.errors import ConfigurationError
from resumekit.requirements import require

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.engine.options import OptionKeywords

__all__ = ["Checkpointer"]

require("accelerate")

# accelerate 1.15 utils/dataclasses.py DistributedType: here every rank holds all of the model.
_REPLICATED = ("NO", "MULTI_CPU", "MULTI_GPU")

_CALLBACKS = Slot.CALLBACKS.value


class Accelerator(Protocol):
    """What is read from an ``accelerate.Accelerator`` (1.15 accelerator.py).

    The lists are private: nothing public gives what was prepared. A test pins them.
    """

    _models: list[torch.nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _custom_objects: list[Any]
    scaler: Any
    step: int

    @property
    def distributed_type(self) -> Any: ...

    @property
    def num_processes(self) -> int: ...

    @property
    def sync_gradients(self) -> bool: ...


class Checkpointer(_Checkpointer):
    """A Checkpointer for what an Accelerator has prepared; made after ``prepare``.

    It takes the prepared models, optimizers and schedulers, the gradient scaler, and what was given
    to ``register_for_checkpointing``. One object of a slot is stored under the slot's name, several
    under class and ordinal, e.g. ``model/Linear-0``.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.engine.options.Options``.

    Raises:
        ConfigurationError: nothing was prepared, or the model is sharded over the ranks.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        directory: str | Path,
        *,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        _check(accelerator)
        self._accelerator = accelerator
        self._tokens = 0  # of the accumulation window under way
        named = [*(ema.values() if isinstance(ema, Mapping) else [ema]), *(extras or {}).values()]
        super().__init__(
            directory,
            components=_components(accelerator, ema=ema, named=named),
            extras=extras,
            generators=generators,
            **options,
        )

    def step(self, *, tokens: int = 0, **values: Any) -> None:
        """Marks one optimizer-step boundary; inside an accumulation window it only adds tokens.

        It may be called after every micro-batch; it counts when ``accelerator.sync_gradients``.

        Args:
            tokens: the tokens that this rank used since the last call.
            **values: what to compare in a trace, e.g. ``loss=loss``; read only when tracing.

        Raises:
            LoopError: no batch has been fetched through ``batches()``.
        """
        self._tokens += tokens
        if self._accelerator.sync_gradients:
            super().step(tokens=self._tokens, **values)
            self._tokens = 0


class _Window:
    """How many micro-batches ``accelerator.accumulate`` has counted: where its windows end."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]


def _check(accelerator: Accelerator) -> None:
    if not accelerator._models:
        raise ConfigurationError(
            "accelerator",
            found="no model was prepared",
            remedy="Make the Checkpointer after accelerator.prepare(model, optimizer, ...)",
        )
    kind = str(accelerator.distributed_type.value)
    if kind not in _REPLICATED:
        raise ConfigurationError(
            "accelerator", found=f"distributed type {kind}, which is not available yet"
        )


def _components(
    accelerator: Accelerator, *, ema: Any, named: Iterable[Any]
) -> tuple[StateComponent, ...]:
    """All that the accelerator holds; what the user gave by name is not taken twice."""
    prepared = [*accelerator._models, *accelerator._optimizers, *accelerator._schedulers]
    # accelerate 1.15 optimizer.py and scheduler.py wrap: the state is that of the object inside.
    optimizers = [each.optimizer for each in accelerator._optimizers]
    schedulers = [each.scheduler for each in accelerator._schedulers]
    taken = {id(each) for each in (*named, *prepared, *optimizers, *schedulers)}
    others: list[Any] = []
    for each in accelerator._custom_objects:
        if id(each) in taken:
            continue
        if isinstance(each, torch.optim.Optimizer):
            optimizers.append(each)
        elif isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            schedulers.append(each)
        else:
            others.append(each)
    model = _slot(accelerator._models)
    components = state_components(
        model=model,
        optimizer=_slot(optimizers),
        lr_scheduler=_slot(schedulers),
        grad_scaler=accelerator.scaler,
        ema=ema,
        adopt=True,
    )
    if accelerator.num_processes > 1:
        components += rank_buffer_components(model=model, ema=ema)
    return (
        *components,
        StateComponent(f"{_CALLBACKS}/accelerator", _Window(accelerator)),
        *(_registered(name, each) for name, each in _by_class_and_ordinal(others).items()),
    )


def _registered(name: str, given: Any) -> StateComponent:
    """A registered object as it gives itself; a module like a model."""
    key = f"{_CALLBACKS}/{name}"
    is_module = isinstance(given, torch.nn.Module)
    pattern = SharingPattern.REPLICATED if is_module else SharingPattern.PER_RANK
    return StateComponent(key, EmaState(given, key=key), pattern)


def _slot(objects: Sequence[Any]) -> Any:
    """What a slot takes: nothing, one object, or a dict of several."""
    if len(objects) < 2:
        return objects[0] if objects else None
    return _by_class_and_ordinal(objects)


def _by_class_and_ordinal(objects: Iterable[Any]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for each in objects:
        bare = unwrapped(each) if isinstance(each, torch.nn.Module) else each
        kind = type(bare).__name__
        named[f"{kind}-{counts[kind]}"] = each
        counts[kind] += 1
    return named
