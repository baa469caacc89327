"""The slots of a run: which one an object belongs to, and the components of their objects.

Parameters of an optimizer that no other component contains have one of their own: an optimizer may
train a bare tensor, the head of a loss module or layers in a plain list. The moments are saved with
the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from resumekit.capture.fsdp1 import (
    FlatModelState,
    FlatOptimizerState,
    flat_modules,
    model_state,
    require_no_flat_parameters,
)
from resumekit.capture.model import (
    ModelState,
    address_of,
    by_class_and_ordinal,
    by_key,
    clean_names,
    modules_in,
)
from resumekit.capture.named_tensors import RANK_BUFFERS, NamedTensors, RankBuffers
from resumekit.capture.nested_state import leaves
from resumekit.capture.objects import ObjectState, ScalerState
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.scheduler import SchedulerState
from resumekit.capture.stacking import StackedByRank
from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.exclusions import trained_parameters
from resumekit.capture.user_state.user_state import UserState
from resumekit.distributed import ranks_of
from resumekit.errors import DeclarationError
from resumekit.serialization.sharding import is_sharded, local_part
from resumekit.state import (
    CaptureLine,
    ComponentState,
    Fidelity,
    SharingPattern,
    Slot,
    StateComponent,
)

# ModelEmaV2, EMAModel, ExponentialMovingAverage, ...
_NAMED_LIKE_AN_AVERAGE = re.compile(r"EMA|Ema(?![a-z])|MovingAverage")


def slot_of(value: Any) -> Slot | None:
    """The slot for an object; None for one without training state."""
    if isinstance(value, LRScheduler):
        return Slot.LR_SCHEDULER
    if isinstance(value, Optimizer):
        return Slot.OPTIMIZER
    if isinstance(value, GradScaler):
        return Slot.GRAD_SCALER
    if isinstance(value, type):
        return None
    has_state = all(hasattr(type(value), name) for name in ("state_dict", "load_state_dict"))
    named_so = _NAMED_LIKE_AN_AVERAGE.search(type(value).__name__)
    if isinstance(value, AveragedModel) or (has_state and named_so):
        return Slot.EMA
    return Slot.MODEL if isinstance(value, nn.Module) else None


def is_training(value: Any, given: Container[int]) -> bool:
    """Whether a framework's object that was not given certainly has state of this training."""
    if isinstance(value, Optimizer):
        trained = [each for group in value.param_groups for each in group["params"]]
        return not all(id(each) in given for each in trained if each.requires_grad)
    if isinstance(value, nn.Module):  # an engine, before its first step: not one of a former run
        is_fresh = value.optimizer is not None and not value.global_steps
        return bool(is_fresh) and id(value.module) not in given
    return isinstance(value, LRScheduler)


# ---------------------------------------------------------------- components of the slots

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


def stack_own_tensors(component: StateComponent, ranks: StackedByRank) -> bool:
    """Lets each rank save what is not sharded of a sharded model or optimizer.

    Returns:
        Whether it has such parameters; False also where FSDP1 or a process group shards it.
    """
    state = component.state
    state = state.weights or state if isinstance(state, ObjectState) else state
    if component.process_group is not None or type(state) not in (ModelState, OptimizerState):
        return False
    assert isinstance(state, ModelState | OptimizerState)
    state.stacked = ranks
    if isinstance(state, ModelState):
        return bool(ranks.parts(dict(state.module.named_parameters())))
    return bool(ranks.parts(state.named_parameters() or {}))


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


# ---------------------------------------------------------------- parameters outside the model

# What the key of such a component ends in.
OPTIMIZER_PARAMETERS = "parameters"

Named = dict[str, Tensor]


class OptimizerParameters(NamedTensors):
    """The values of an optimizer's parameters that no other component contains.

    Names are the optimizer's: ``group0.param3``, or those that the optimizer was given.
    """

    remedy = "Give the optimizer the parameters that it had when the checkpoint was written"


def parameter_components(components: Sequence[StateComponent]) -> tuple[StateComponent, ...]:
    """A component for each optimizer with parameters that the other components lack.

    Args:
        components: of a run.
    """
    found: list[StateComponent] = []
    contained = _Contained(components)
    for component in _optimizers(components):
        missing = contained.missing_of(component.stateful)
        if missing:
            found.append(_component(component, components, missing.values()))
    return tuple(found)


def uncaptured_parameters(
    components: Sequence[StateComponent], *, are_complete: bool = False
) -> Iterator[CaptureLine]:
    """A line of the capture report for each optimizer with parameters that are not saved.

    Args:
        components: of a run, including those of ``parameter_components``.
        are_complete: whether these were added just now, so that none can be missing.
    """
    keys = {each.key for each in components}
    contained = None if are_complete else _Contained(components)
    for component in _optimizers(components):
        key = f"{component.key}/{OPTIMIZER_PARAMETERS}"
        if key in keys:
            continue
        missing = {} if contained is None else contained.missing_of(component.stateful)
        if isinstance(component.stateful, OptimizerState):
            missing = {**missing, **component.stateful.lost_parameters()}
        if missing:
            names = ", ".join(list(missing)[:3]) + (", .." if len(missing) > 3 else "")
            reason = f"{len(missing)} trained and in no module of this run ({names})"
            yield CaptureLine(key, Fidelity.LOST, f"{reason}; move them into the model")


def _component(
    optimizer: StateComponent, components: Sequence[StateComponent], missing: Iterable[Tensor]
) -> StateComponent:
    def named() -> Named:
        return _Contained(components).missing_of(optimizer.stateful)

    key = f"{optimizer.key}/{OPTIMIZER_PARAMETERS}"
    sharded = optimizer.process_group is not None or any(map(is_sharded, missing))
    return StateComponent(
        key,
        OptimizerParameters(named, key=key),
        SharingPattern.SHARDED if sharded else SharingPattern.REPLICATED,
        process_group=optimizer.process_group,
        validate=optimizer.validate,
    )


def _optimizers(components: Iterable[StateComponent]) -> Iterator[StateComponent]:
    for component in components:
        if component.slot == Slot.OPTIMIZER.value and not isinstance(
            component.stateful, OptimizerParameters
        ):
            yield component


def _parameters_of(stateful: Any) -> Named:
    """The parameters of an optimizer by name; empty for one without param groups."""
    named = stateful.named_parameters() if isinstance(stateful, OptimizerState) else None
    if named is not None:
        return dict(named)
    return {
        f"group{g}.param{p}": parameter
        for g, group in enumerate(_groups_of(stateful))
        for p, parameter in enumerate(group["params"])
    }


def _names_its_groups(stateful: Any) -> bool:
    """Whether its named parameters are those of its param groups."""
    is_ours = isinstance(stateful, OptimizerState)
    return is_ours and type(stateful).named_parameters is OptimizerState.named_parameters


def _groups_of(stateful: Any) -> list[Any]:
    """The param groups of an optimizer, or of the one that a component saves; empty without any."""
    groups = getattr(getattr(stateful, "optimizer", stateful), "param_groups", None)
    return groups if isinstance(groups, list) else []


class _Contained:
    """The parameters that the components of a run save."""

    def __init__(self, components: Sequence[StateComponent]) -> None:
        self._components = components
        self._identities = {
            id(parameter)
            for component in components
            for parameter in _saved_parameters(component.stateful)
        }

    def missing_of(self, optimizer: Any) -> Named:
        """The parameters of an optimizer, by its names, that no component saves."""
        if _names_its_groups(optimizer):
            groups = _groups_of(optimizer)
            if all(id(each) in self._identities for group in groups for each in group["params"]):
                return {}  # the usual case, for which no names are needed
        named = _parameters_of(optimizer)
        missing = {n: p for n, p in named.items() if id(p) not in self._identities}
        # A model component may be a user object, whose state shares memory with the parameters.
        saved = {_memory(each) for each in self._saved_by_objects()} - {None}
        return {n: p for n, p in missing.items() if _memory(p) not in saved}

    def _saved_by_objects(self) -> Iterator[Any]:
        for component in self._components:
            if component.slot == Slot.MODEL.value and _module_of(component.stateful) is None:
                state = component.stateful.state_dict()
                yield from state.values() if isinstance(state, Mapping) else ()


def _saved_parameters(stateful: Any) -> Iterator[Tensor]:
    """The parameters of a component's module that its ``state_dict`` contains."""
    module = _module_of(stateful)
    if module is None:
        return
    modules = modules_in(module)
    if type(stateful) is ModelState and all(map(_saves_its_parameters, modules)):
        # Not parameters(), which a class of the user's may define otherwise.
        registered = (each for module in modules for each in vars(module)["_parameters"].values())
        yield from (each for each in registered if each is not None)
        return
    # First: a hook of FSDP2 registers the sharded parameters again, which are the optimizer's. A
    # forward pass without gradients leaves the whole ones of the root registered.
    holder: Any = stateful.weights if isinstance(stateful, ObjectState) else stateful
    state = holder.state_dict()
    named = dict(module.named_parameters(remove_duplicate=False))
    if named.keys() - state.keys():  # the names differ, or the state leaves some out
        clean = clean_names(module, named)
        named = {raw: each for raw, each in named.items() if clean[raw] in state or raw in state}
    yield from named.values()


def _module_of(stateful: Any) -> nn.Module | None:
    """The module that a component saves."""
    if isinstance(stateful, ObjectState):
        return _module_of(stateful.weights)
    if isinstance(stateful, ModelState):
        return stateful.module
    return stateful if isinstance(stateful, nn.Module) else None


# torch 2.13 nn/modules/module.py: what a module may have of its own in place of these methods.
_OF_TORCH = {name: getattr(nn.Module, name) for name in ("state_dict", "_save_to_state_dict")}


def _saves_its_parameters(module: nn.Module) -> bool:
    """Whether its part of a ``state_dict`` is made by torch's own code, which leaves none out."""
    kind, attributes = type(module), vars(module)
    if attributes["_state_dict_hooks"] or attributes["_state_dict_pre_hooks"]:
        return False
    return all(
        getattr(kind, name) is method and name not in attributes
        for name, method in _OF_TORCH.items()
    )


def _memory(value: Any) -> tuple[Any, ...] | None:
    """What two values that share memory have in common; None without an address."""
    address, local = address_of(value), local_part(value)
    return (local.device, address, local.numel()) if address else None
