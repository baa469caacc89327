"""An optimizer's state by parameter name, restored bit for bit.

``torch.optim.Optimizer.load_state_dict`` casts every moment to its parameter's dtype, replaces the
param group dicts and learning-rate tensors that others may hold, and matches parameters by position
alone. Optimizers that inherit it are therefore loaded here, in the same order of hooks; one that
has its own method is loaded by that method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resumekit.capture.model import parameter_names
from resumekit.capture.nested_state import (
    Mismatch,
    Restorer,
    class_name,
    describe,
    entries_of,
    fits,
    merged_optimizers,
    pairs_in,
    part_of_optimizer,
    refuse,
    require_class,
    require_loadable,
)
from resumekit.capture.optimizer_objects import ObjectsInState
from resumekit.capture.optimizer_state import (
    OptimizerContent,
    hyperparameters,
    membership_mismatches,
    optimizer_mismatches,
)
from resumekit.capture.stacking import StackedByRank
from resumekit.errors import ConfigurationError
from resumekit.serialization.sharding import (
    FlatPart,
    is_sharded,
    local_part,
    part_like,
    sharded_dims,
    sharded_like,
    sharded_over,
)
from resumekit.serialization.tensors import is_subclass
from resumekit.state import Adopting, Checked, ComponentState, InPlace, Renamed, Renaming

_REMEDY = "Build the optimizer as it was when the checkpoint was written"

Group = Mapping[str, Any]
NamedParameters = list[tuple[str, Tensor]]


class OptimizerState(Checked, Renamed, Adopting, InPlace):
    """The state of one optimizer by FQN, without wrapper prefixes.

    The saved layout is that of torch's distributed ``get_state_dict``: ``state`` by FQN and
    ``param_groups`` with FQNs under ``params``; also the class, and each parameter's dtype and
    shape. The state of an object without param groups is stored unchanged.

    Args:
        optimizer: any ``torch.optim.Optimizer``, or an object with both methods.
        modules: the modules whose parameters it updates, by name. A parameter outside them has
            the name that the optimizer was given, or its position, ``group0.param3``.
        key: the component's key, for errors.
        prefix: of the names of parameters outside the modules, to keep those of several pipeline
            stages distinct.
    """

    schema: ClassVar[Any] = OptimizerContent
    stacked: StackedByRank | None = None  # how it stores the moments of unsharded parameters

    def __init__(
        self,
        optimizer: Any,
        modules: Mapping[str, nn.Module],
        *,
        key: str = "optimizer",
        prefix: str = "",
    ) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self.modules = dict(modules)
        self.key = key

    def live_objects(self) -> tuple[Any, ...]:
        given, groups = self.optimizer, getattr(self.optimizer, "param_groups", ())
        trained = (each for group in groups for each in group["params"])
        return (given, *self._covered_state(), groups, *trained)

    def _covered_state(self) -> tuple[Any, ...]:
        """``optimizer.state``, if that is what ``state_dict`` gives.

        A wrapper may give the state of the optimizer inside it, and keep one of its own.
        """
        state = getattr(self.optimizer, "state", None)
        if type(self.optimizer).state_dict is Optimizer.state_dict or not isinstance(state, dict):
            return (state,)
        given = self.optimizer.state_dict().get("state")
        values = given.values() if isinstance(given, dict) else ()
        saved = {id(each) for each in values}
        return (state,) if state and all(id(each) in saved for each in state.values()) else ()

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies. The optimizer's own ``state_dict`` hooks run.

        Raises:
            ConfigurationError: two parameters have one name.
        """
        given = self._by_name(self.optimizer.state_dict())
        if self.stacked is not None and "state" in given:
            for name in self._parts().keys() & given["state"].keys():
                given["state"][name] = self.stacked.stacked(given["state"][name])
        return given

    def adopted(self, given: Any) -> dict[str, Any]:
        """The state by name; without names, by the position of a parameter in its group."""
        sizes = [len(group["params"]) for group in getattr(self.optimizer, "param_groups", ())]
        groups = given.get("param_groups") if isinstance(given, dict) else None
        then = [len(group.get("params", ())) for group in groups or () if isinstance(group, dict)]
        if isinstance(groups, list):
            self.require_sizes(then, sizes)
        return self._by_name(self._in_live_order(given))

    def _in_live_order(self, given: Any) -> Any:
        """The same, where the groups have the names of the live parameters, as those of DCP."""
        named = [[name for name, _ in pairs] for pairs in self._named_groups()]
        groups = given["param_groups"] if _has_torch_layout(given, self.optimizer) else []
        then = [group["params"] for group in groups]
        if {*chain(*then)} != {*chain(*named)}:
            return given
        moved = [*membership_mismatches(groups, [{"params": each} for each in named])]
        refuse(self.key, moved, remedy=_REMEDY)
        ordered = zip(groups, named, strict=True)
        return {**given, "param_groups": [{**group, "params": each} for group, each in ordered]}

    def require_sizes(self, then: Sequence[int], now: Sequence[int]) -> None:
        """Raises StateMismatchError unless the groups have as many parameters as they had."""
        if then != now:
            words = (f"groups of {', '.join(map(str, each))} parameters" for each in (then, now))
            refuse(self.key, [Mismatch.changed("param_groups", *words)], remedy=_REMEDY)

    def _by_name(self, given: Any) -> dict[str, Any]:
        if not _has_torch_layout(given, self.optimizer):
            return {"class": class_name(self.optimizer), "opaque": given}
        groups, state = given["param_groups"], given["state"]
        if inherits_load(self.optimizer):
            objects = ObjectsInState(self.optimizer)
            state = {identity: objects.as_plain(values) for identity, values in state.items()}
        named = self._named_groups()
        name_of = {
            identity: name
            for pairs, group in zip(named, groups, strict=True)
            for (name, _), identity in zip(pairs, group["params"], strict=True)
        }
        return self._in_layout(
            named,
            groups,
            {name_of[k]: v for k, v in state.items() if k in name_of},
            unnamed={k: v for k, v in state.items() if k not in name_of},
            other={k: v for k, v in given.items() if k not in ("state", "param_groups")},
        )

    def check_state_dict(self, state: Any) -> None:
        """Refuses another class, other parameters, other groups and other types of group values."""
        remedy = f"{_REMEDY}, or pass exclude={{{self.key!r}}} to start it afresh"
        require_class(self.key, state["class"], self.optimizer, remedy=remedy)
        live = self.state_dict()
        if ("opaque" in live) != ("opaque" in state):
            layouts = ["by parameter", "a state of its own"]
            then, now = layouts["opaque" in state], layouts["opaque" in live]
            refuse(self.key, [Mismatch.changed("", then, now)], remedy=remedy)
        if "opaque" in live:
            require_loadable(self.key, self.optimizer, state["opaque"])
            return
        is_order_bound = isinstance(self.optimizer, torch.optim.LBFGS)
        mismatches = optimizer_mismatches(state, live, is_order_bound=is_order_bound)
        moments = self._subclass_mismatches(state, live)
        refuse(self.key, [*mismatches, *moments, *self._unknown_objects(state)], remedy=_REMEDY)

    def _unknown_objects(self, state: Group) -> Iterator[Mismatch]:
        objects = ObjectsInState(self.optimizer)
        stacked = self._parts() if self.stacked is not None else {}
        for name, values in state["state"].items():
            step = values.get("step") if isinstance(values, dict) else None
            if isinstance(step, Tensor) and step.numel() != 1 and name not in stacked:
                yield Mismatch.changed(f"{name}['step']", describe(step), "a number")
            for key, kind in objects.not_made(values):
                expected = f"a class that the module of {class_name(self.optimizer)} has"
                yield Mismatch.changed(f"{name}[{key!r}]", kind, expected)

    def _subclass_mismatches(self, state: Group, live: Group) -> Iterator[Mismatch]:
        """Moments made of other tensors than the live ones, and those of sharded parameters."""
        for name, parameter in chain(*self._named_groups()):
            values = state["state"].get(name)
            is_part = is_sharded(parameter) or name in self._parts()
            for key, then in values.items() if isinstance(values, dict) else ():
                now = live["state"].get(name, {}).get(key, then)
                if (is_subclass(then) or is_subclass(now)) and (is_part or not fits(now, then)):
                    expected = "a moment of a sharded parameter" if is_part else describe(now)
                    yield Mismatch.changed(f"{name}[{key!r}]", describe(then), expected)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores every value bit for bit, with its dtype.

        Param group dicts, learning-rate tensors and existing moments keep their identity; new
        moments are created on the parameter's device, or are those of the state where they are on
        it already: do not use the state afterwards. Hyperparameters are the checkpoint's; a group's
        keys that it lacks keep their live value.
        """
        if "opaque" in state:
            self.optimizer.load_state_dict(state["opaque"])
            return ()
        if self.stacked is not None:
            moments = dict(state["state"])
            for name in self._parts().keys() & moments.keys():
                moments[name] = self.stacked.unstacked(moments[name])
            state = {**state, "state": moments}
        packed = self._packed(state)
        if inherits_load(self.optimizer):
            load_exactly(self.optimizer, packed)
        else:
            self.optimizer.load_state_dict(packed)
        return ()

    def pairs(self, state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
        """Moments that do not exist yet get the placements, or the range, of their parameter."""
        live = self.state_dict()
        if "opaque" in live:
            yield from pairs_in(state, live)
            return
        parameters = {**dict(chain(*self._named_groups())), **self._parts()}
        for fqn, values in state["state"].items():
            if fqn not in parameters or not isinstance(values, dict):
                continue
            known = live["state"].get(fqn, {})
            own_dims = state.get("sharded_dims", {}).get(fqn, {})
            for name, value in values.items():
                partner = placement_source(name, value, parameters[fqn], known)
                if partner is None and name in own_dims:
                    partner = _sharded_as(own_dims[name], value, parameters[fqn])
                if partner is not None and partner.shape == value.shape:
                    yield value, partner
        yield from pairs_in(state["unnamed_state"], live["unnamed_state"])

    def live_tensors(self, state: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """The moments that exist, if they are loaded here."""
        is_ours = type(self).load_state_dict is OptimizerState.load_state_dict
        saved = state.get("state") if isinstance(state, Mapping) else None
        if not (is_ours and isinstance(saved, Mapping) and inherits_load(self.optimizer)):
            return
        if self.optimizer._optimizer_load_state_dict_pre_hooks:
            return
        for name, parameter in chain(*self._named_groups()):
            values = saved.get(name)
            for key, live in self.optimizer.state.get(parameter, {}).items():
                if is_sharded(live) or not isinstance(values, dict):
                    continue
                if fits(live, values.get(key)):
                    yield values[key], live

    def renamed(self, state: Any, renaming: Renaming) -> Any:
        if not isinstance(state, Mapping) or not state.keys() >= {"parameters", "param_groups"}:
            return state  # in a layout of the optimizer's own
        groups = state["param_groups"]
        return {
            **state,
            **{
                n: renaming.keys(state[n])
                for n in ("parameters", "state", "sharded_dims")
                if n in state
            },
            "param_groups": [{**g, "params": renaming.listed(g["params"])} for g in groups],
        }

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state of those of the optimizers of several pipeline stages."""
        return merged_optimizers(self.key, states)

    def part_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the live parameters, in the live groups."""
        names = [[name for name, _ in named] for named in self._named_groups()]
        return part_of_optimizer(self.key, state, names)

    def named_parameters(self) -> dict[str, Tensor] | None:
        """The parameters by the names of the state; None for an optimizer without param groups."""
        if not isinstance(getattr(self.optimizer, "param_groups", None), list):
            return None
        return dict(chain(*self._named_groups()))

    def lost_parameters(self) -> Mapping[str, Any]:
        """Trained parameters that no component of the run can restore."""
        return {}

    def fingerprint(self) -> dict[str, Any]:
        """The class and, for each group, its size and hyperparameters."""
        groups = getattr(self.optimizer, "param_groups", [])
        return {
            "class": class_name(self.optimizer),
            "param_groups": [
                {"num_parameters": len(named), **hyperparameters(group)}
                for named, group in zip(self._named_groups(), groups, strict=True)
            ],
        }

    def _named_groups(self) -> list[NamedParameters]:
        """The parameters of each group with their names."""
        groups = getattr(self.optimizer, "param_groups", [])
        found = iter(parameter_names(self.modules, [p for g in groups for p in g["params"]]))
        named = [
            [
                (next(found) or self._name_outside(group, g, p), parameter)
                for p, parameter in enumerate(group["params"])
            ]
            for g, group in enumerate(groups)
        ]
        owner: dict[str, Tensor] = {}
        for name, parameter in chain(*named):
            if owner.setdefault(name, parameter) is not parameter:
                raise ConfigurationError(
                    f"{self.key}: {name}",
                    found="two parameters have this name",
                    expected="one parameter for one name",
                )
        return named

    def _name_outside(self, group: Mapping[str, Any], number: int, position: int) -> str:
        """The name of a parameter that is in no module."""
        given = group.get("param_names")  # torch 2.6: the optimizer was given named parameters
        name = str(given[position]) if given is not None else f"group{number}.param{position}"
        return f"{self.prefix}{name}"

    def _parts(self) -> Mapping[str, FlatPart]:
        """This rank's part of each parameter that is stored sharded and is no DTensor, by name."""
        if self.stacked is None:
            return {}
        return self.stacked.parts(dict(chain(*self._named_groups())))

    def _in_layout(
        self,
        named: Sequence[NamedParameters],
        groups: Sequence[Group],
        state: Mapping[str, Any],
        *,
        unnamed: Mapping[Any, Any],
        other: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The saved layout, with the dtype and shape of each parameter."""
        parts = self._parts()
        own_dims = dict(self._own_dims(state, dict(chain(*named))))
        return {
            **({"sharded_dims": own_dims} if own_dims else {}),
            "class": class_name(self.optimizer),
            "parameters": {n: describe(parts.get(n, parameter)) for n, parameter in chain(*named)},
            "state": state,
            "param_groups": [
                {**hyperparameters(group), "params": [name for name, _ in pairs]}
                for pairs, group in zip(named, groups, strict=True)
            ],
            "unnamed_state": unnamed,
            "other": other,
        }

    def _own_dims(
        self, state: Mapping[str, Any], parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """How DTensors of the state are sharded that do not follow their parameter, by name."""
        for fqn, values in state.items():
            if not isinstance(values, dict) or not is_sharded(parameters.get(fqn)):
                continue
            own_dims = {
                name: sharded_dims(value, f"{self.key}/state/{fqn}/{name}")
                for name, value in values.items()
                if is_sharded(value) and not _follows(name, value, parameters[fqn])
            }
            if own_dims:
                yield fqn, own_dims

    def _packed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state in torch's own layout, by the position of the live parameters."""
        named = self._named_groups()
        return by_position(state, [[name for name, _ in pairs] for pairs in named])


def by_position(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A state in the layout of ``torch.optim.Optimizer.state_dict``.

    Args:
        state: as ``OptimizerState`` gives it, by name.
        names: of the parameters of each group, in their order.
    """
    ids = {name: index for index, name in enumerate(dict.fromkeys(chain(*names)))}
    groups = [
        {**saved, "params": [ids[name] for name in group]}
        for saved, group in zip(state["param_groups"], names, strict=True)
    ]
    by_id = {ids[name]: values for name, values in state["state"].items()}
    return {
        "state": {**by_id, **state["unnamed_state"]},
        "param_groups": groups,
        **state["other"],
    }


def _has_torch_layout(given: Any, optimizer: Any) -> bool:
    """Whether a state dict follows torch's layout for the optimizer's own param groups."""
    live = getattr(optimizer, "param_groups", None)
    if not isinstance(given, dict) or not isinstance(live, list):
        return False
    groups, state = given.get("param_groups"), given.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict) or len(groups) != len(live):
        return False
    return all(
        isinstance(group, dict) and len(group.get("params", ())) == len(partner["params"])
        for group, partner in zip(groups, live, strict=True)
    )


def inherits_load(optimizer: Any) -> bool:
    """Whether ``load_state_dict`` is that of ``torch.optim.Optimizer``."""
    is_torchs = getattr(type(optimizer), "load_state_dict", None) is Optimizer.load_state_dict
    return is_torchs and "load_state_dict" not in vars(optimizer)


def load_exactly(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Like ``Optimizer.load_state_dict``, without its casts and in place.

    Args:
        optimizer: an optimizer for which ``inherits_load`` holds.
        packed: a state in the layout of ``Optimizer.state_dict``.

    Source: torch 2.13 optim/optimizer.py, Optimizer.load_state_dict; its hooks run in its order.
    """
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = pre_hook(optimizer, packed)
        packed = packed if changed is None else changed
    restore = restore_groups(optimizer, packed["param_groups"])
    owner: dict[Any, tuple[Tensor, dict[str, Any]]] = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        pairs = zip(saved["params"], group["params"], strict=True)
        owner.update({identity: (parameter, group) for identity, parameter in pairs})
    restored: dict[Any, Any] = {}
    objects = ObjectsInState(optimizer)
    for identity, saved in packed["state"].items():
        parameter, group = owner.get(identity, (None, {}))
        key = identity if parameter is None else parameter
        live = optimizer.state.get(key, {})
        if parameter is None or not isinstance(saved, dict):
            restored[key] = restore(live, saved)
            continue
        restored[key] = {
            name: objects.restored(live.get(name), value, restore)
            or restore(
                live.get(name),
                part_like(placement_source(name, value, parameter, live), value),
                partial(_moment, parameter, on_host=is_host_step(name, group)),
            )
            for name, value in saved.items()
        }
    optimizer.state.clear()
    optimizer.state.update(restored)
    # Fills in what the state of an older torch lacks. The objects are the same: identities stay.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def restore_groups(optimizer: Optimizer, saved_groups: Sequence[Group]) -> Restorer:
    """Restores the hyperparameters; the rest of the load continues with the same Restorer."""
    restore = Restorer()
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        for name, value in hyperparameters(saved).items():
            group[name] = restore(group.get(name), value)
    return restore


def placement_source(name: str, value: Any, parameter: Any, live: Mapping[str, Any]) -> Any:
    """The part whose placements a value of a parameter's state gets; None for an unsharded one.

    Args:
        name: of the value in the parameter's state.
        value: the saved one.
        parameter: the live parameter, or this rank's part of it.
        live: the parameter's live state, empty before the first step.
    """
    if not isinstance(value, Tensor):
        return None
    if isinstance(live.get(name), Tensor):
        return live[name] if is_sharded(live[name]) else None
    return parameter if is_sharded(parameter) and _follows(name, value, parameter) else None


def _follows(name: str, value: Tensor, parameter: Any) -> bool:
    """Whether an optimizer made a value from the parameter: a moment, not a step count."""
    return bool(value.shape == parameter.shape) and name != "step"


def _sharded_as(dims: Sequence[int | None], value: Any, parameter: Any) -> Any:
    """A part of a value of its own shape; None where the parameter is whole."""
    is_tensor = isinstance(value, Tensor) and not isinstance(parameter, FlatPart)
    is_on_mesh = is_tensor and is_sharded(parameter)
    return sharded_over(parameter, value.shape, dims) if is_on_mesh else None


def is_host_step(name: str, group: Mapping[str, Any]) -> bool:
    """Whether a value is a step count that its optimizer keeps in host memory."""
    # torch 2.13 keeps a step count in host memory unless the kernel itself reads it.
    return name == "step" and not (group.get("capturable") or group.get("fused"))


def _moment(parameter: Tensor, saved: Tensor, *, on_host: bool) -> Tensor:
    """A saved tensor on the device where the optimizer keeps it."""
    # The memory layout stays the saved one: reductions (Adafactor's, Muon's) depend on it.
    part = local_part(saved).detach()
    device = part.device if on_host else local_part(parameter).device
    made: Tensor = part.to(device)
    return sharded_like(saved, made) if is_sharded(saved) else made


def pairs_of(live: ComponentState, state: Any) -> Iterator[tuple[Tensor, Any]]:
    """Each tensor of a saved state with the live DTensor whose mesh and placements it gets.

    Args:
        live: the live state; its moments may not exist yet.
        state: the saved state, its tensors on the meta device.
    """
    if isinstance(live, OptimizerState):
        return live.pairs(state)
    return pairs_in(state, live.state_dict())


def part_of(live: ComponentState, state: Any) -> Any:
    """What the live state has of a merged one of several pipeline stages."""
    if isinstance(live, OptimizerState):
        return live.part_of(state)
    return entries_of(state, live.state_dict())
