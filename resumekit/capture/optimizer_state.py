"""What a checkpoint has of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypedDict

from torch import Tensor

from resumekit.capture.nested_state import describe
from resumekit.serialization.sharding import FlatPart
from resumekit.state import Misfit, Rule


class _Moments:
    """torch's own optimizers have the same values for all parameters of a group."""

    # Adafactor keeps factors of matrices, LBFGS one flat state. torch 2.13 optim.
    _OTHERS = ("torch.optim.adafactor.", "torch.optim._adafactor.", "torch.optim.lbfgs.")

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        if value["class"].startswith("torch.optim.") and not value["class"].startswith(
            self._OTHERS
        ):
            for group in value["param_groups"]:
                found = {n: value["state"][n] for n in group["params"] if n in value["state"]}
                yield from self._of_group(found, value["parameters"], path)

    def _of_group(
        self, found: Mapping[str, Any], parameters: Mapping[str, str], path: str
    ) -> Iterator[Misfit]:
        kinds: dict[str, set[Any]] = {}
        for fqn, values in found.items():
            if not isinstance(values, dict):
                yield Misfit(f"{path}.state.{fqn}".lstrip("."), describe(values), "a dict")
                return
            for name, each in values.items():
                if name == "step" and not _may_count(each, parameters[fqn]):
                    yield Misfit(f"{path}.state.{fqn}.step".lstrip("."), describe(each), "a number")
                    return
                kinds.setdefault(name, set()).add(_kind(each, parameters[fqn]))
        for fqn, values in found.items():
            where = f"{path}.state.{fqn}".lstrip(".")
            if values.keys() != kinds.keys():
                names = ", ".join(sorted(map(str, kinds.keys() ^ values.keys())))
                yield Misfit(where, f"other values than its group: {names}", "the same")
        for name, several in kinds.items():
            if len(several - {None}) > 1:
                where = f"{path}.state.*.{name}".lstrip(".")
                yield Misfit(where, " and ".join(sorted(several - {None})), "one kind of value")


def _may_count(step: Any, parameter: str) -> bool:
    """Whether a step count is one number, or one for each rank; see ``StackedByRank``."""
    is_one = not isinstance(step, (Tensor, FlatPart)) or len(step.shape) == 0 or step.shape == (1,)
    return is_one or (len(step.shape) == 1 and f"({step.shape[0]}, " in parameter)


def _kind(value: Any, parameter: str) -> str | None:
    """What a value is in comparison with its parameter; None for what may be either.

    Args:
        value: of the parameter's state.
        parameter: its dtype and shape, as ``describe`` gives them.
    """
    if not isinstance(value, (Tensor, FlatPart)):
        return type(value).__name__
    shape = str(tuple(value.shape))
    if parameter.endswith(" ()"):
        return None
    return "a tensor of the parameter's shape" if parameter.endswith(f" {shape}") else "a tensor"


class _OptionalOptimizer(TypedDict, total=False):
    sharded_dims: dict[str, Any]


def _names_parameters(group: Mapping[str, Any]) -> bool:
    names = group.get("params")
    return isinstance(names, list) and all(isinstance(each, str) for each in names)


def _are_known(state: Mapping[str, Any]) -> bool:
    """Whether each parameter is in one group, and values are those of parameters."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    return sorted(names) == sorted(state["parameters"]) and {*state["state"]} <= {*names}


_Group = Annotated[dict[str, Any], Rule("the names of its parameters", _names_parameters)]
_OpaqueState = TypedDict("_OpaqueState", {"class": str, "opaque": Any})
_Class = TypedDict("_Class", {"class": str})


class _OptimizerFields(_Class, _OptionalOptimizer):
    parameters: dict[str, str]
    state: dict[str, Any]
    param_groups: list[_Group]
    unnamed_state: dict[Any, Any]
    other: dict[str, Any]


_Named = Annotated[_OptimizerFields, Rule("each parameter in one group", _are_known), _Moments()]

OptimizerContent = _Named | _OpaqueState
