"""The leaves of a stored state by name, and the comparison of those that are no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from resumekit.serialization import (
    StatePath,
    StoredState,
    StoredTensor,
    UniqueNames,
    leaves_of,
    state_digest,
)

_MAX_CHARACTERS = 40
_ARRAYS = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "c8", "c16", "b1"})

Leaves = dict[str, Any]  # a StoredTensor, a Tensor with its values, or a plain value


def named_leaves(stored: StoredState, renamed: Mapping[str, str] = MappingProxyType({})) -> Leaves:
    """The leaves of a state by the dotted name of their path.

    Args:
        stored: the state.
        renamed: other names of parameters. They replace keys, and strings that are such names (the
            parameters of a param group).
    """
    leaves: Leaves = {}
    names = UniqueNames()  # a key with a dot may look like two keys
    for path, leaf in leaves_of(stored.state):
        if isinstance(leaf, str):
            leaf = renamed.get(leaf, leaf)
        name = names.take(_renamed(path, renamed).name or "value")
        leaves[name] = _as_tensor(stored.tensors.get(id(leaf), leaf))
    return leaves


def _renamed(path: StatePath, renamed: Mapping[str, str]) -> StatePath:
    if not renamed or path.parent is None:
        return path
    part = path.part
    if path.kind == "key" and isinstance(part, str):
        part = renamed.get(part, part)
    return StatePath(part, path.kind, _renamed(path.parent, renamed))


def _as_tensor(leaf: Any) -> Any:
    """An array of a type that torch has, as a tensor."""
    if type(leaf) is np.ndarray and leaf.dtype.str[1:] in _ARRAYS and leaf.dtype.isnative:
        return torch.from_numpy(leaf.copy())
    return leaf


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is compared element by element."""
    return isinstance(leaf, StoredTensor | Tensor)


def are_equal(first: Any, second: Any) -> bool:
    """Whether two plain values have the same type and the same bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, int | str | bytes) or first is None:
        return bool(first == second)
    if isinstance(first, float) and not math.isnan(first) and first != 0:
        return bool(first == second)
    return state_digest(first) == state_digest(second)


def short_text(leaf: Any) -> str:
    """A value on one short line; what is cut off is represented by its digest."""
    if is_tensor(leaf):
        kind = leaf.element.name if isinstance(leaf, StoredTensor) else leaf.dtype
        return f"tensor {str(kind).removeprefix('torch.')} {list(leaf.shape)}"
    text = " ".join(repr(leaf).split())
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}... (digest {state_digest(leaf)[:8]})"
