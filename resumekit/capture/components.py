"""Builds the components of a run's models, optimizers, schedulers, scalers and averages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from resumekit.capture.averages import ObjectState
from resumekit.capture.fsdp1 import (
    FlatModelState,
    FlatOptimizerState,
    flat_modules,
    model_state,
    require_no_flat_parameters,
)
from resumekit.capture.model import RANK_BUFFERS, ModelState, RankBuffers
from resumekit.capture.naming import by_class_and_ordinal, by_key
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.restore import leaves
from resumekit.capture.scaler import ScalerState
from resumekit.capture.scheduler import SchedulerState
from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.exclusions import trained_parameters
from resumekit.capture.user_state.user_state import UserState
from resumekit.distributed import ranks_of
from resumekit.errors import DeclarationError
from resumekit.serialization import is_sharded
from resumekit.state import ComponentState, SharingPattern, Slot, StateComponent

# The slots that differ between pipeline stages; schedulers and scalers are the same on all ranks.
_IN_STAGES = frozenset({Slot.MODEL.value, Slot.OPTIMIZER.value, Slot.EMA.value})


def state_components(
    *,
    model: Any,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    grad_scaler: Any = None,
    ema: Any = None,
    num_ranks: int = 1,
    stage_group: Any = None,
) -> tuple[StateComponent, ...]:
    """The components of a run's shared objects, each slot one object or a dict of named ones.

    Args:
        model: modules; they also name the optimizers' parameters.
        optimizer: optimizers.
        lr_scheduler: schedulers.
        grad_scaler: gradient scalers.
        ema: averaged models, or objects with ``state_dict``.
        num_ranks: with several, the per-rank buffers of the modules are added.
        stage_group: of a pipeline stage, the ranks that hold it together; see ``StateComponent``.

    Raises:
        DeclarationError: a slot was given a list, or an object without ``state_dict``.
    """
    modules = _modules(model)
    is_flat = any(True for module in modules.values() for _ in flat_modules(module))
    optimizer_kind = FlatOptimizerState if is_flat else OptimizerState
    optimizers, averages = by_key(Slot.OPTIMIZER, optimizer), by_key(Slot.EMA, ema)
    for key, each in averages.items():
        require_no_flat_parameters(key, each)
    names = {key.removeprefix(f"{Slot.MODEL.value}/"): each for key, each in modules.items()}
    prefix = _stage_prefix(stage_group)
    kinds: tuple[tuple[Mapping[str, Any], Callable[..., ComponentState]], ...] = (
        (modules, model_state),
        (optimizers, partial(optimizer_kind, modules=names, prefix=prefix)),
        (by_key(Slot.LR_SCHEDULER, lr_scheduler), SchedulerState),
        (by_key(Slot.GRAD_SCALER, grad_scaler), ScalerState),
        (averages, ObjectState),
    )
    states = {key: kind(each, key=key) for given, kind in kinds for key, each in given.items()}
    shared = [
        StateComponent(key, stateful, SharingPattern.SHARDED, process_group=stage_group)
        if stage_group is not None and key.split("/")[0] in _IN_STAGES
        else StateComponent(key, stateful, _pattern_of(stateful))
        for key, stateful in states.items()
    ]
    attributes = attribute_components(model, [*optimizers.values(), *averages.values()])
    if num_ranks == 1:
        return (*shared, *attributes)
    buffers = rank_buffer_components(model=model, ema=ema, even_none=stage_group is not None)
    return (*shared, *attributes, *buffers)


def _stage_prefix(stage_group: Any) -> str:
    """A prefix that keeps parameters outside the model distinct between pipeline stages."""
    ranks = None if stage_group is None else ranks_of(stage_group)
    return f"rank{min(ranks)}." if ranks else ""


def _pattern_of(stateful: ComponentState) -> SharingPattern:
    return SharingPattern.SHARDED if _is_sharded(stateful) else SharingPattern.REPLICATED


def _is_sharded(stateful: ComponentState) -> bool:
    if isinstance(stateful, (FlatModelState, FlatOptimizerState)):
        return True
    if isinstance(stateful, OptimizerState):
        groups = getattr(stateful.optimizer, "param_groups", ())
        return any(is_sharded(parameter) for group in groups for parameter in group["params"])
    model = stateful.weights if isinstance(stateful, ObjectState) else stateful
    if isinstance(model, ModelState):
        return any(map(is_sharded, (*model.module.parameters(), *model.module.buffers())))
    return isinstance(stateful, ObjectState) and any(map(is_sharded, leaves(stateful.state_dict())))


def registered_components(objects: Iterable[Any]) -> tuple[StateComponent, ...]:
    """The components of objects that a user registered with the framework, by class and ordinal.

    A module is replicated like a model; any other object is per rank.
    """
    return tuple(
        StateComponent(
            f"{Slot.CALLBACKS.value}/{name}",
            ObjectState(each, key=f"{Slot.CALLBACKS.value}/{name}"),
            SharingPattern.REPLICATED if isinstance(each, nn.Module) else SharingPattern.PER_RANK,
        )
        for name, each in by_class_and_ordinal(objects).items()
    )


def rank_buffer_components(
    *, model: Any, ema: Any = None, even_none: bool = False
) -> tuple[StateComponent, ...]:
    """The per-rank buffers of the replicated modules, for runs of several ranks.

    Args:
        model: modules, as given to ``state_components``.
        ema: averaged models; objects that are no modules are skipped.
        even_none: include modules without buffers, because another rank's may have some.
    """
    given = {**by_key(Slot.MODEL, model), **by_key(Slot.EMA, ema)}
    buffers = [
        RankBuffers(model_state(value, key=key), key=f"{key}/{RANK_BUFFERS}")
        for key, value in given.items()
        if isinstance(value, nn.Module)
    ]
    return tuple(
        StateComponent(each.key, each, SharingPattern.PER_RANK)
        for each in buffers
        if even_none or each.state_dict()
    )


def _modules(model: Any) -> Mapping[str, nn.Module]:
    modules = by_key(Slot.MODEL, model)
    for key, module in modules.items():
        if not isinstance(module, nn.Module):
            raise DeclarationError(
                key, found=f"a {type(module).__name__}", expected="a torch.nn.Module"
            )
    return modules


def attribute_components(model: Any, others: Iterable[Any] = ()) -> tuple[StateComponent, ...]:
    """The attributes of modules as components: each rank has its own.

    They are flags (``requires_grad``, ``training``), buffers with ``persistent=False``, and
    attributes. A module with ``get_extra_state`` says itself which of its attributes are state.

    Args:
        model: a module, or a dict of named ones, as the script has made them.
        others: what else of the run is saved: optimizers with their parameters, averages.
    """
    models = by_key(Slot.MODEL, model)
    given = [*models.values(), *others]
    return tuple(
        UserState(
            {key.replace("/", "."): Holder(module, is_component=True)},
            key=f"{key}/attributes",
            foreign=lambda: [*given, *trained_parameters(given)],
        ).component()
        for key, module in models.items()
    )
