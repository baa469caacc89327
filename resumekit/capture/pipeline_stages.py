"""States of which each group of ranks holds some entries, as pipeline stages hold some layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor

from resumekit.capture.restore import describe
from resumekit.errors import StateMismatchError
from resumekit.state import ComponentState

Group = dict[str, Any]


def merge_states(live: ComponentState | None, key: str, states: Sequence[Any]) -> Any:
    """One state of those of all groups.

    Args:
        live: the live state, None where it is not known yet; its ``merge_state_dicts`` decides
            where it has one.
        key: of the component, for errors.
        states: one of each group.

    Raises:
        StateMismatchError: two groups have different values under one name.
    """
    if len(states) == 1:
        return states[0]
    result = None if live is None else live.merge_state_dicts(states)
    return union(key, states) if result is None else result


def union(where: str, states: Sequence[Any]) -> Any:
    """The union of nested dicts; other values must be equal in all.

    Args:
        where: the name in errors.
        states: all dicts, or all other values.

    Raises:
        StateMismatchError: two of them have different values under one name.
    """
    first = states[0]
    if not all(isinstance(state, Mapping) for state in states):
        for other in states[1:]:
            if not is_same(first, other):
                raise StateMismatchError(
                    where,
                    found=f"{describe(first)} and {describe(other)} of two groups of ranks",
                    expected="the same from all groups",
                    remedy="Make the component a ComponentState with the method merge_state_dicts",
                )
        return first
    names = dict.fromkeys(name for state in states for name in state)
    return {
        name: union(f"{where}: {name}", [state[name] for state in states if name in state])
        for name in names
    }


def is_same(value: Any, other: Any) -> bool:
    """Whether two values have the same type and bits; of meta tensors, the same shape."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if value.dtype != other.dtype or value.shape != other.shape:
            return False
        return value.is_meta or other.is_meta or torch.equal(value, other)
    if isinstance(value, (list, tuple)) and type(value) is type(other):
        same_length = len(value) == len(other)
        return same_length and all(is_same(a, b) for a, b in zip(value, other, strict=True))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(is_same(value[k], other[k]) for k in value)
    return type(value) is type(other) and bool(value == other)


def entries_of(state: Any, live: Any) -> Any:
    """The entries of a merged state that the live one has."""
    if not isinstance(state, Mapping) or not isinstance(live, Mapping):
        return state
    return {name: entries_of(item, live[name]) for name, item in state.items() if name in live}


def merged_optimizers(key: str, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state in the layout of ``OptimizerState``.

    Param groups with the same index and hyperparameters become one group. Groups with different
    hyperparameters, for instance a learning rate of each stage, stay separate.

    Raises:
        StateMismatchError: the stages have different optimizers, or different values for one name.
    """
    if any("opaque" in state for state in states):
        return dict(union(key, states))
    rest = [{name: v for name, v in state.items() if name != "param_groups"} for state in states]
    groups: list[Group] = []
    for of_stages in zip_longest(*(state["param_groups"] for state in states)):
        alike: list[Group] = []
        for group in filter(None, of_stages):  # a stage may have fewer groups
            _join(alike, group)
        groups += alike
    return {**union(key, rest), "param_groups": groups}


def part_of_optimizer(
    key: str, state: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The part of a merged state that an optimizer with these parameters needs.

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
    """Adds the parameters of a group to an equal one of ``groups``, or the group to ``groups``."""
    for other in groups:
        if is_same(_settings(other), _settings(group)):
            other["params"] = list(dict.fromkeys([*other["params"], *group["params"]]))
            return
    groups.append(dict(group))


def _group(key: str, number: int, names: Sequence[str], group_of: Mapping[str, Group]) -> Group:
    known = [name for name in names if name in group_of]
    if not known:
        return {"params": []}
    first = _settings(group_of[known[0]])
    for name, setting in product(known[1:], first):
        other = group_of[name].get(setting)
        if not is_same(first[setting], other):
            raise StateMismatchError(
                f"{key}: param_groups[{number}][{setting!r}]",
                found=f"{first[setting]} for {known[0]} and {other} for {name}",
                expected="one value for all parameters of a group",
                remedy="Give the parameters groups of their own, as when they were saved",
            )
    return {**first, "params": known}


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name != "params"}


def _only(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}
