"""State of which each group of ranks holds some entries, as pipeline stages hold some layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from resumekit.capture.restore import describe
from resumekit.errors import StateMismatchError


def merged(stateful: Any, key: str, states: Sequence[Any]) -> Any:
    """One state of those of all groups.

    Args:
        stateful: the live object, None where it is not known yet; its ``merge_state_dicts``, where
            it has one, knows best.
        key: of the component, for errors.
        states: one of each group.

    Raises:
        StateMismatchError: two groups have different values under one name.
    """
    if len(states) == 1:
        return states[0]
    own = getattr(stateful, "merge_state_dicts", None)
    return own(states) if own is not None else union(key, states)


def part_of(stateful: Any, state: Any) -> Any:
    """What the live object holds of a whole state; its own ``part_of`` knows best."""
    own = getattr(stateful, "part_of", None)
    return own(state) if own is not None else _entries_of(state, stateful.state_dict())


def union(where: str, states: Sequence[Any]) -> Any:
    """Nested dicts with the entries of all; what is no dict must be the same in all.

    Args:
        where: what errors call them.
        states: of one kind.

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
                    remedy="Give the component a method merge_state_dicts",
                )
        return first
    names = dict.fromkeys(name for state in states for name in state)
    return {
        name: union(f"{where}: {name}", [state[name] for state in states if name in state])
        for name in names
    }


def is_same(value: Any, other: Any) -> bool:
    """Whether two values have the same type and bits; of tensors without values, the same shape."""
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


def _entries_of(state: Any, live: Any) -> Any:
    if not isinstance(state, Mapping) or not isinstance(live, Mapping):
        return state
    return {name: _entries_of(item, live[name]) for name, item in state.items() if name in live}
