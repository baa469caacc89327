"""Parameters that an optimizer trains and that no other component contains.

An optimizer may train a bare tensor, the head of a loss module or layers in a plain list. The
moments are saved with the optimizer; the values are a separate component.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from resumekit.capture.averages import ObjectState
from resumekit.capture.model import ModelState, NamedTensors, address_of
from resumekit.capture.naming import clean_names, modules_in
from resumekit.capture.optimizer import OptimizerState
from resumekit.serialization import is_sharded, local_part
from resumekit.state import (
    CaptureLine,
    Fidelity,
    SharingPattern,
    Slot,
    StateComponent,
)

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
    state = _state_of(stateful)
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


def _state_of(stateful: Any) -> Mapping[str, Any]:
    """The state of such a component."""
    holder: Any = stateful.weights if isinstance(stateful, ObjectState) else stateful
    state: Mapping[str, Any] = holder.state_dict()
    return state


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
