"""What a checkpoint has of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypedDict

from torch import Tensor

from resumekit.capture.nested_state import (
    Mismatch,
    describe,
    description_mismatches,
    fits,
    is_same_sort,
    is_too_large,
    paired,
)
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


# ---------------------------------------------------------------- beside the live optimizer

# Not hyperparameters: which parameters a group holds.
_MEMBERSHIP = ("params", "param_names")

Group = Mapping[str, Any]


def optimizer_mismatches(
    saved: Mapping[str, Any], live: Mapping[str, Any], *, is_order_bound: bool
) -> Iterator[Mismatch]:
    """Everything that would make a load fail or restore silently wrong values.

    Args:
        saved: ``parameters`` (a description by name) and ``param_groups`` of the checkpoint.
        live: the same of this run.
        is_order_bound: whether the order of the parameters matters, as for an optimizer that keeps
            one flat vector for all of them.
    """
    yield from description_mismatches(saved["parameters"], live["parameters"])
    groups_then, groups_now = saved["param_groups"], live["param_groups"]
    if len(groups_then) != len(groups_now):
        yield Mismatch.changed("param_groups", f"{len(groups_then)} groups", len(groups_now))
        return
    yield from membership_mismatches(groups_then, groups_now)
    for index, (group_then, group_now) in enumerate(zip(groups_then, groups_now, strict=True)):
        where = f"param_groups[{index}]"
        if is_order_bound and group_then["params"] != group_now["params"]:
            yield Mismatch(where, f"parameters {group_then['params']}", f"{group_now['params']}")
        differing = {k: v for k, v in group_then.items() if k != _scaled(group_then, group_now)}
        for path, then, now in paired(differing, group_now, where):
            if (
                (isinstance(then, Tensor) or isinstance(now, Tensor)) and not fits(now, then)
            ) or not _may_be_set(then, now):
                yield Mismatch.changed(path, describe(then), describe(now))


def _may_be_set(then: Any, now: Any) -> bool:
    """Whether a hyperparameter may have a saved value: of the same kind, a flag also None."""
    of_other_lengths = isinstance(then, (list, tuple)) and isinstance(now, (list, tuple))
    if of_other_lengths or is_too_large(then):
        return False
    if now is None or (then is None and isinstance(now, bool)):
        return True
    return is_same_sort(then, now) and isinstance(then, bool) == isinstance(now, bool)


def _scaled(then: Group, now: Group) -> str | None:
    """The hyperparameter that is a number until the first step replaces it by a tensor.

    transformers 5.23 optimization.py AdafactorSchedule records the learning rate that Adafactor has
    scaled by the parameters.
    """
    rate = then.get("lr")
    is_scaled = bool(now.get("scale_parameter")) and not isinstance(now.get("lr"), Tensor)
    return "lr" if is_scaled and isinstance(rate, Tensor) and rate.dim() == 0 else None


def membership_mismatches(then: Sequence[Group], now: Sequence[Group]) -> Iterator[Mismatch]:
    """The parameters that are in another group than in the checkpoint."""
    group_of = {name: index for index, group in enumerate(now) for name in group["params"]}
    for index, group in enumerate(then):
        for name in group["params"]:
            here = group_of.get(name, index)
            if here != index:
                yield Mismatch(name, f"in param group {index}", f"in group {here}, as in this run")


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a param group without its parameters and their names."""
    return {name: value for name, value in group.items() if name not in _MEMBERSHIP}
