"""Loading an optimizer bit for bit: no casts, no replaced objects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from resumekit.capture.restore import Restorer
from resumekit.serialization import is_sharded, local_part, part_like, sharded_like

# Not hyperparameters: which parameters a group holds.
_MEMBERSHIP = ("params", "param_names")


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a param group holds beside its parameters and their names."""
    return {name: value for name, value in group.items() if name not in _MEMBERSHIP}


def inherits_load(optimizer: Any) -> bool:
    """Whether the optimizer has no ``load_state_dict`` of its own."""
    is_torchs = getattr(type(optimizer), "load_state_dict", None) is Optimizer.load_state_dict
    return is_torchs and "load_state_dict" not in vars(optimizer)


def load_exactly(optimizer: Optimizer, packed: dict[str, Any], *, adopt: bool = False) -> None:
    """Does what ``Optimizer.load_state_dict`` does, without its casts and in place.

    Args:
        optimizer: an optimizer for which ``inherits_load`` holds.
        packed: a state in the layout of ``Optimizer.state_dict``.
        adopt: take tensors over instead of copying them, where they are as they must be.

    Source: torch 2.13 optim/optimizer.py, Optimizer.load_state_dict; its hooks run in its order.
    """
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = pre_hook(optimizer, packed)
        packed = packed if changed is None else changed
    restore = Restorer()
    owner: dict[Any, tuple[Tensor, dict[str, Any]]] = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for name, value in hyperparameters(saved).items():
            group[name] = restore(group.get(name), value)
        pairs = zip(saved["params"], group["params"], strict=True)
        owner.update({identity: (parameter, group) for identity, parameter in pairs})
    restored: dict[Any, Any] = {}
    for identity, saved in packed["state"].items():
        parameter, group = owner.get(identity, (None, {}))
        key = identity if parameter is None else parameter
        live = optimizer.state.get(key, {})
        if parameter is None or not isinstance(saved, dict):
            restored[key] = restore(live, saved)
            continue
        restored[key] = {
            name: restore(
                live.get(name),
                part_like(spread_like(name, value, parameter, live), value),
                partial(_moment, parameter, adopt=adopt, on_host=is_host_step(name, group)),
            )
            for name, value in saved.items()
        }
    optimizer.state.clear()
    optimizer.state.update(restored)
    # Fills in what the state of an older torch lacks. The same objects again: identities stay.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def spread_like(name: str, value: Any, parameter: Tensor, live: Mapping[str, Any]) -> Any:
    """The DTensor that a value of a parameter's state is spread like; None for one that is whole.

    Args:
        name: of the value in the parameter's state.
        value: the saved one.
        parameter: the live parameter.
        live: the parameter's live state, empty before the first step.
    """
    if not isinstance(value, Tensor):
        return None
    if isinstance(live.get(name), Tensor):
        return live[name] if is_sharded(live[name]) else None
    # Made from the parameter, as every optimizer makes its moments; its count of steps is not.
    is_moment = value.shape == parameter.shape and name != "step"
    return parameter if is_moment and is_sharded(parameter) else None


def is_host_step(name: str, group: Mapping[str, Any]) -> bool:
    """Whether a value is a step count that its optimizer reads on the host."""
    # torch 2.13 keeps a step count on the host unless the kernel itself reads it.
    return name == "step" and not (group.get("capturable") or group.get("fused"))


def _moment(parameter: Tensor, saved: Tensor, *, adopt: bool, on_host: bool) -> Tensor:
    """A tensor for the optimizer to keep, where its parameter is."""
    # It keeps the saved layout in memory: reductions (Adafactor's, Muon's) depend on it.
    part = local_part(saved).detach()
    device = part.device if on_host else local_part(parameter).device
    made: Tensor = part.to(device, copy=not adopt)
    return sharded_like(saved, made) if is_sharded(saved) else made
