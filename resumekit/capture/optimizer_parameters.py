"""Parameters that an optimizer trains and that no other component contains.

An optimizer may train a bare tensor, the head of a loss module or layers in a plain list. The
moments are saved with the optimizer; the values are a separate component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from resumekit.capture.averages import ObjectState
from resumekit.capture.model import ModelState
from resumekit.capture.naming import clean_name
from resumekit.capture.restore import refuse, state_mismatches
from resumekit.serialization import fill, is_sharded, local_part
from resumekit.state import (
    CaptureLine,
    ComponentState,
    Fidelity,
    SharingPattern,
    Slot,
    StateComponent,
)

# What the key of such a component ends in.
OPTIMIZER_PARAMETERS = "parameters"

_REMEDY = "Give the optimizer the parameters that it had when the checkpoint was written"

Named = dict[str, Tensor]


class OptimizerParameters(ComponentState):
    """The values of an optimizer's parameters that no other component contains, by name.

    Names are the optimizer's: ``group0.param3``, or those that the optimizer was given.

    Args:
        named: gives the live parameters by name; called for each save and restore, because param
            groups may be added later.
        key: the component's key, for errors.
    """

    def __init__(self, named: Callable[[], Named], *, key: str) -> None:
        self.key = key
        self.named = named

    def state_dict(self) -> Named:
        """The live values, not copies."""
        return {name: parameter.detach() for name, parameter in self.named().items()}

    def check_state_dict(self, state: Any) -> None:
        """Refuses other names, shapes and dtypes."""
        refuse(self.key, state_mismatches(state, self.named()), remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into the live parameter of that name."""
        for name, parameter in self.named().items():
            fill(parameter, state[name])
        return ()


def parameter_components(components: Sequence[StateComponent]) -> tuple[StateComponent, ...]:
    """A component for each optimizer with parameters that the other components lack.

    Args:
        components: of a run.
    """
    found: list[StateComponent] = []
    contained = _Contained(components)
    for component in _optimizers(components):
        named = _parameters_of(component.stateful)
        missing = None if named is None else contained.missing(named)
        if missing:
            found.append(_component(component, components, missing.values()))
    return tuple(found)


def uncaptured_parameters(components: Sequence[StateComponent]) -> Iterator[CaptureLine]:
    """A line of the capture report for each optimizer with parameters that are not saved.

    Args:
        components: of a run, including those of ``parameter_components``.
    """
    keys = {each.key for each in components}
    contained = _Contained(components)
    for component in _optimizers(components):
        key = f"{component.key}/{OPTIMIZER_PARAMETERS}"
        if key in keys:
            continue
        named = _parameters_of(component.stateful)
        missing = {} if named is None else contained.missing(named)
        if isinstance(component.stateful, ComponentState):
            missing = {**missing, **component.stateful.lost_parameters()}
        if missing:
            names = ", ".join(list(missing)[:3]) + (", .." if len(missing) > 3 else "")
            reason = f"{len(missing)} trained and in no module of this run ({names})"
            yield CaptureLine(key, Fidelity.LOST, f"{reason}; move them into the model")


def _component(
    optimizer: StateComponent, components: Sequence[StateComponent], missing: Iterable[Tensor]
) -> StateComponent:
    def named() -> Named:
        return _Contained(components).missing(_parameters_of(optimizer.stateful) or {})

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


def _parameters_of(stateful: Any) -> Named | None:
    """The parameters of an optimizer by name; None for one without param groups."""
    named = stateful.named_parameters() if isinstance(stateful, ComponentState) else None
    if named is not None:
        return dict(named)
    groups = getattr(getattr(stateful, "optimizer", stateful), "param_groups", None)
    if not isinstance(groups, list):
        return None
    return {
        f"group{g}.param{p}": parameter
        for g, group in enumerate(groups)
        for p, parameter in enumerate(group["params"])
    }


class _Contained:
    """The parameters that the components of a run save."""

    def __init__(self, components: Sequence[StateComponent]) -> None:
        self._components = components
        self._identities = {
            id(parameter)
            for component in components
            for parameter in _saved_parameters(component.stateful)
        }

    def missing(self, named: Named) -> Named:
        """The parameters that no component saves."""
        missing = {n: p for n, p in named.items() if id(p) not in self._identities}
        if not missing:
            return {}
        # A model component may be a user object, whose state shares memory with the parameters.
        saved = set(self._addresses())
        return {n: p for n, p in missing.items() if _address(p) not in saved}

    def _addresses(self) -> Iterator[tuple[Any, ...]]:
        for component in self._components:
            if component.slot == Slot.MODEL.value and _holder(component.stateful) is None:
                state = component.stateful.state_dict()
                for value in state.values() if isinstance(state, Mapping) else ():
                    address = _address(value) if isinstance(value, Tensor) else None
                    if address is not None:
                        yield address


def _saved_parameters(stateful: Any) -> Iterator[Tensor]:
    """The parameters of a component's module that its ``state_dict`` contains."""
    holder = _holder(stateful)
    if holder is None:
        return
    module, state = holder
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        if clean_name(module, raw) in state or raw in state:
            yield parameter


def _holder(stateful: Any) -> tuple[nn.Module, Mapping[str, Any]] | None:
    """The module that a component saves, and its state."""
    if isinstance(stateful, ObjectState):
        return _holder(stateful.weights)
    if isinstance(stateful, ModelState):
        return stateful.module, stateful.state_dict()
    return (stateful, stateful.state_dict()) if isinstance(stateful, nn.Module) else None


def _address(tensor: Tensor) -> tuple[Any, ...] | None:
    """The memory of a tensor with elements; two tensors with one address share it."""
    tensor = local_part(tensor)
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.numel()
