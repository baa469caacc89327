"""The optimizer states of several pipeline stages as one, and what one stage needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resumekit.capture.optimizer_load import hyperparameters
from resumekit.capture.stages import is_same, union
from resumekit.errors import StateMismatchError

Group = dict[str, Any]


def merged_optimizers(key: str, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state in the layout of ``OptimizerState``.

    Param groups of one number and the same hyperparameters become one group. Where the stages have
    different ones, a learning rate of their own, the groups stay apart.

    Raises:
        StateMismatchError: the stages have different optimizers, or different values for one name.
    """
    if any("opaque" in state for state in states):
        return dict(union(key, states))
    rest = [{name: v for name, v in state.items() if name != "param_groups"} for state in states]
    groups: list[Group] = []
    for index in range(max(len(state["param_groups"]) for state in states)):
        alike: list[Group] = []
        for state in states:
            if index < len(state["param_groups"]):
                _join(alike, state["param_groups"][index])
        groups += alike
    return {**union(key, rest), "param_groups": groups}


def part_of_optimizer(
    key: str, state: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """What an optimizer with these parameters needs of a state of more of them.

    Args:
        key: of the component, for errors.
        state: in the layout of ``OptimizerState``.
        names: of the live parameters, group by group.

    Raises:
        StateMismatchError: the parameters of a live group had different hyperparameters.
    """
    if "opaque" in state:
        return dict(state)
    group_of = {name: group for group in state["param_groups"] for name in group["params"]}
    live = {name for group in names for name in group}
    return {
        **state,
        "parameters": _only(state["parameters"], live),
        "state": _only(state["state"], live),
        "param_groups": [_group(key, n, group, group_of) for n, group in enumerate(names)],
    }


def _join(groups: list[Group], group: Group) -> None:
    """Adds the parameters of a group to those of the one like it, or the group itself."""
    for other in groups:
        if is_same(hyperparameters(other), hyperparameters(group)):
            other["params"] = list(dict.fromkeys([*other["params"], *group["params"]]))
            return
    groups.append(dict(group))


def _group(key: str, number: int, names: Sequence[str], group_of: Mapping[str, Group]) -> Group:
    known = [name for name in names if name in group_of]
    if not known:
        return {"params": []}
    first = hyperparameters(group_of[known[0]])
    for name in known[1:]:
        other = hyperparameters(group_of[name])
        for setting in first:
            if not is_same(first[setting], other.get(setting)):
                raise StateMismatchError(
                    f"{key}: param_groups[{number}][{setting!r}]",
                    found=f"{first[setting]} for {known[0]} and {other.get(setting)} for {name}",
                    expected="one value for all parameters of a group",
                    remedy="Give the parameters groups of their own, as when they were saved",
                )
    return {**first, "params": known}


def _only(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}
