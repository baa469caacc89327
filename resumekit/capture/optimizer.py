"""An optimizer's state by parameter name, given back bit for bit.

``torch.optim.Optimizer.load_state_dict`` casts every moment to its parameter's dtype, replaces the
param group dicts and learning-rate tensors that others may hold, and matches parameters by position
alone. Optimizers that inherit it are therefore loaded here, in the same order of hooks; one that
brings its own is loaded by its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from resumekit.capture.naming import parameter_names
from resumekit.capture.optimizer_load import (
    hyperparameters,
    inherits_load,
    load_exactly,
    spread_like,
)
from resumekit.capture.optimizer_mismatch import optimizer_mismatches
from resumekit.capture.optimizer_stages import merged_optimizers, part_of_optimizer
from resumekit.capture.restore import (
    class_name,
    describe,
    is_same_class,
    pairs_in,
    refuse,
    require_fields,
)
from resumekit.errors import ConfigurationError, StateMismatchError

_REMEDY = "Build the optimizer as it was when the checkpoint was written"


class OptimizerState:
    """The state of one optimizer under parameter names (FQN), without wrapper prefixes.

    The saved layout is that of torch's distributed ``get_state_dict``: ``state`` by FQN and
    ``param_groups`` with FQNs under ``params``; beside them the class and what each parameter was.
    An object that only has ``state_dict`` and ``load_state_dict`` is stored as it gives itself.

    Args:
        optimizer: any ``torch.optim.Optimizer``, or an object with both methods.
        modules: the modules whose parameters it updates, by name. A parameter outside all of them
            has the name that the optimizer was given, or its position, ``group0.param3``.
        key: the component's key, for errors.
        adopt: take the tensors of a loaded state over instead of copying them, where they are on
            the right device. Only for a state that nobody else uses afterwards.
        prefix: before the names of parameters outside all modules; those of several pipeline
            stages would else be the same.
    """

    def __init__(
        self,
        optimizer: Any,
        modules: Mapping[str, nn.Module],
        *,
        key: str = "optimizer",
        adopt: bool = False,
        prefix: str = "",
    ) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self.modules = dict(modules)
        self.key = key
        self.adopt = adopt

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies. The optimizer's own ``state_dict`` hooks run.

        Raises:
            ConfigurationError: two parameters have one name.
        """
        given = self.optimizer.state_dict()
        if not _has_torch_layout(given, self.optimizer):
            return {"class": class_name(self.optimizer), "opaque": given}
        names = self._names()
        name_of = _names_by_id(names, given["param_groups"])
        named = {name_of[k]: v for k, v in given["state"].items() if k in name_of}
        unnamed = {k: v for k, v in given["state"].items() if k not in name_of}
        groups = [
            {**hyperparameters(group), "params": names[index]}
            for index, group in enumerate(given["param_groups"])
        ]
        other = {k: v for k, v in given.items() if k not in ("state", "param_groups")}
        return {
            "class": class_name(self.optimizer),
            "parameters": self._parameters(names),
            "state": named,
            "param_groups": groups,
            "unnamed_state": unnamed,
            "other": other,
        }

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: another class, another number of param groups, a parameter that is
                missing, unexpected, likely renamed, of another shape or dtype or in another group,
                or a group value that is a tensor on one side only.
        """
        require_fields(self.key, state, {"class": str})
        if not is_same_class(state["class"], class_name(self.optimizer)):
            raise StateMismatchError(
                self.key,
                found=f"the checkpoint has the state of a {state['class']}",
                expected=f"a {class_name(self.optimizer)}, as here",
                remedy=f'{_REMEDY}, or pass exclude={{"optimizer"}} to start it afresh',
            )
        live = self.state_dict()
        if "opaque" in live:
            require_fields(self.key, state, {"opaque": object})
            return
        fields = {"parameters": dict, "state": dict, "param_groups": list, "unnamed_state": dict}
        require_fields(self.key, state, {**fields, "other": dict})
        is_order_bound = isinstance(self.optimizer, torch.optim.LBFGS)
        mismatches = optimizer_mismatches(state, live, is_order_bound=is_order_bound)
        refuse(self.key, list(mismatches), remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Gives every value back, bit for bit, with its dtype.

        Param group dicts, learning-rate tensors and moments that exist already keep their identity;
        new moments are made on the parameter's device. Hyperparameters are the checkpoint's; a
        group's keys that it lacks keep their live value.

        Returns:
            What did not come back exactly: nothing.
        """
        if "opaque" in state:
            self.optimizer.load_state_dict(self._own(state["opaque"]))
            return ()
        packed = self._packed(state)
        if inherits_load(self.optimizer):
            load_exactly(self.optimizer, packed, adopt=self.adopt)
        else:
            self.optimizer.load_state_dict(self._own(packed))
        return ()

    def pairs(self, state: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
        """Each saved tensor with the live DTensor that it is to be spread like.

        Moments that do not exist yet are to be spread like their parameter.
        """
        live = self.state_dict()
        if "opaque" in live:
            yield from pairs_in(state, live)
            return
        parameters = self._parameters_by_name()
        for fqn, values in state["state"].items():
            if fqn not in parameters or not isinstance(values, dict):
                continue
            known = live["state"].get(fqn, {})
            for name, value in values.items():
                partner = spread_like(name, value, parameters[fqn], known)
                if partner is not None and partner.shape == value.shape:
                    yield value, partner
        yield from pairs_in(state["unnamed_state"], live["unnamed_state"])

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state of those of the optimizers of several pipeline stages.

        Raises:
            StateMismatchError: other classes, or different values for one name.
        """
        return merged_optimizers(self.key, states)

    def part_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the live parameters need of the state of more parameters, in the live groups.

        Raises:
            StateMismatchError: the parameters of a live group had different hyperparameters.
        """
        return part_of_optimizer(self.key, state, self._names())

    def named_parameters(self) -> dict[str, Tensor] | None:
        """The parameters by the names of the state; None where the optimizer does not show them."""
        if not isinstance(getattr(self.optimizer, "param_groups", None), list):
            return None
        return self._parameters_by_name()

    def trained_parameters(self) -> list[Tensor]:
        """The live parameters that the script gave to the optimizer."""
        return list((self.named_parameters() or {}).values())

    def fingerprint(self) -> dict[str, Any]:
        """The class and, for each group, its size and hyperparameters."""
        groups = getattr(self.optimizer, "param_groups", [])
        return {
            "class": class_name(self.optimizer),
            "param_groups": [
                {"num_parameters": len(group["params"]), **hyperparameters(group)}
                for group in groups
            ],
        }

    def _own(self, value: Any) -> Any:
        return value if self.adopt else copy.deepcopy(value)

    def _names(self) -> list[list[str]]:
        """The names of each group's parameters."""
        groups = self.optimizer.param_groups
        found = iter(parameter_names(self.modules, [p for g in groups for p in g["params"]]))
        names = [
            [next(found) or self._name_outside(group, g, p) for p in range(len(group["params"]))]
            for g, group in enumerate(groups)
        ]
        owner: dict[str, int] = {}
        for group, group_names in zip(groups, names, strict=True):
            for parameter, name in zip(group["params"], group_names, strict=True):
                if owner.setdefault(name, id(parameter)) != id(parameter):
                    raise ConfigurationError(
                        f"{self.key}: {name}",
                        found="the name of two parameters",
                        expected="one parameter for one name",
                    )
        return names

    def _name_outside(self, group: Mapping[str, Any], number: int, position: int) -> str:
        """The name of a parameter that is in no module."""
        given = group.get("param_names")  # torch 2.6: the optimizer was given named parameters
        name = str(given[position]) if given is not None else f"group{number}.param{position}"
        return f"{self.prefix}{name}"

    def _parameters_by_name(self) -> dict[str, Tensor]:
        return {
            name: parameter
            for group, names in zip(self.optimizer.param_groups, self._names(), strict=True)
            for name, parameter in zip(names, group["params"], strict=True)
        }

    def _parameters(self, names: list[list[str]]) -> dict[str, str]:
        """What each parameter is (dtype and shape), by name."""
        return {
            name: describe(parameter)
            for group, group_names in zip(self.optimizer.param_groups, names, strict=True)
            for name, parameter in zip(group_names, group["params"], strict=True)
        }

    def _packed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state in torch's own layout, by the position of the live parameters."""
        ids: dict[str, int] = {}
        for name in (name for names in self._names() for name in names):
            ids.setdefault(name, len(ids))
        groups = [
            {**saved, "params": [ids[name] for name in names]}
            for saved, names in zip(state["param_groups"], self._names(), strict=True)
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


def _names_by_id(names: list[list[str]], groups: list[dict[str, Any]]) -> dict[Any, str]:
    return {
        identity: name
        for group_names, group in zip(names, groups, strict=True)
        for name, identity in zip(group_names, group["params"], strict=True)
    }
