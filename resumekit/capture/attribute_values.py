"""The attributes of an object that hold plain values or tensors, and change in training."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from resumekit.capture.devices import made_on
from resumekit.capture.inplace import Restorer
from resumekit.errors import UnsupportedValueError
from resumekit.payload import state_digest

_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_SEQUENCES = frozenset({list, tuple, set, deque})
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_ARRAYS = (Tensor, np.ndarray)

# An attribute that appears in training and is larger holds what was computed, and is no state.
_MAX_ITEMS = 10_000
_MAX_ELEMENTS = 1 << 16
_MAX_DEPTH = 16


class AttributeValues:
    """What the attributes of an object hold, as far as it is not what they held at first.

    An attribute that appears in training and holds something else (an object, a large tensor)
    cannot be saved. What changed beside it is then left out as well: a flag or a length may
    describe what would be missing, as those of a cache do.

    Args:
        holder: the object, as the script has made it.
        left_out: attributes that are no state, or are saved elsewhere.
        only: where it is known, which attributes are state.
    """

    def __init__(
        self,
        holder: Any,
        *,
        left_out: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> None:
        self._holder = holder
        self._left_out = frozenset(left_out)
        self._only = only
        self._first: dict[str, Any] = {}
        self._plain: dict[str, Any] = {}
        self._unknown: set[str] = set()
        for name, value in self._attributes():
            gist = _gist(value, is_new=False)
            if gist is None:
                self._unknown.add(name)
                continue
            self._first[name] = gist
            if not any(isinstance(each, _ARRAYS) for each in _leaves_of(value)):
                self._plain[name] = copy.deepcopy(value)

    def changed(self) -> dict[str, Any]:
        """The values that are others now, by attribute: live tensors, not copies."""
        changed, made = self._now()
        return {} if made else changed

    def lost(self) -> list[str]:
        """The attributes whose values are others now and are not saved."""
        changed, made = self._now()
        # What a layer has computed is made anew by the next forward pass.
        return sorted(n for n, value in changed.items() if made and not _is_computed(value))

    def first(self, names: Iterable[str]) -> dict[str, Any]:
        """The plain values that these attributes held at first, where they are known."""
        return {name: self._plain[name] for name in names if name in self._plain}

    def begun_otherwise(self, first: Mapping[str, Any]) -> set[str]:
        """The attributes that this script begins with another plain value than a former one did.

        Args:
            first: what ``first`` gave in the launch before.
        """
        return {
            name
            for name, value in first.items()
            if name in self._plain and _gist(value, is_new=False) != self._first[name]
        }

    def put_back(
        self,
        saved: Mapping[str, Any],
        *,
        off_host: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        """Gives the attributes the values that were saved, and the others those of the start.

        Args:
            saved: what ``changed`` gave.
            off_host: the attributes of which that lay in the memory of a device.
            device: where their tensors are made.
        """
        holder, restore = self._holder, Restorer()
        changed, _ = self._now()
        for name, value in {**self.first(changed), **saved}.items():
            made = made_on(device if name in off_host else None)
            setattr(holder, name, restore(_to_fill(getattr(holder, name, None)), value, made))

    def _now(self) -> tuple[dict[str, Any], bool]:
        """The values that are others, and whether there is something new that cannot be saved."""
        changed: dict[str, Any] = {}
        made = False
        for name, value in self._attributes():
            if name in self._unknown:
                continue
            gist = _gist(value, is_new=name not in self._first)
            if gist is not None and gist != self._first.get(name):
                changed[name] = value
            made = made or (gist is None and not _is_computed(value))
        return changed, made

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        return (
            (name, value)
            for name, value in vars(self._holder).items()
            if name not in self._left_out
            and (self._only is None or name in self._only)
            and not (inspect.isroutine(value) or isinstance(value, partial))
        )


def _to_fill(live: Any) -> Any:
    """What is filled in place, or None: a tensor may be another attribute too, a default say."""
    return None if isinstance(live, Tensor) and not live.requires_grad else live


def without_fractions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that hold no float, neither alone nor in a container."""
    return {n: v for n, v in values.items() if float not in map(type, _leaves_of(v))}


def _gist(value: Any, *, is_new: bool) -> Any:
    """What two values have in common only if they are equal; None of one that cannot be saved."""
    if type(value) in _SCALARS:
        return type(value), value
    if type(value) is tuple and all(type(each) in _SCALARS for each in value):
        return tuple, value, [type(each) for each in value]
    if not _is_savable(value, is_new=is_new):
        return None
    try:
        return state_digest(value)
    except UnsupportedValueError:
        return None


def _is_savable(value: Any, *, is_new: bool) -> bool:
    if type(value) in _SEQUENCES | _MAPPINGS and len(value) > _MAX_ITEMS:
        return False
    leaves = list(_leaves_of(value))
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    if any(isinstance(each, nn.Parameter) or each.is_meta for each in tensors):
        return False
    num_elements = sum(math.prod(each.shape) for each in leaves if isinstance(each, _ARRAYS))
    is_known = all(
        isinstance(each, (*_ARRAYS, np.generic)) or type(each) in _SCALARS for each in leaves
    )
    return is_known and len(leaves) <= _MAX_ITEMS and not (is_new and num_elements > _MAX_ELEMENTS)


def _is_computed(value: Any) -> bool:
    """Whether it is the outcome of a forward pass: a tensor with a graph, or some of them."""
    tensors = list(tensors_of(value))
    return bool(tensors) and all(each.grad_fn is not None for each in tensors)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a value, alone or in containers."""
    return (each for each in _leaves_of(value) if isinstance(each, Tensor))


def _leaves_of(value: Any, depth: int = 0) -> Iterator[Any]:
    """What containers hold; what is nested too deeply, as a part of itself is, counts as one."""
    if depth < _MAX_DEPTH and type(value) in _SEQUENCES:
        for each in value:
            yield from _leaves_of(each, depth + 1)
    elif depth < _MAX_DEPTH and type(value) in _MAPPINGS:
        for each in value.values():
            yield from _leaves_of(each, depth + 1)
    else:
        yield value
