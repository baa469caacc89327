"""Tensors made of others, such as 8-bit moments: found by the name of their class, and built.

A class never comes from a name in a file. It is that of a live tensor; or one that a library has
put among ``torch.serialization.get_safe_globals()``, as torchao does when a script imports it.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from resumekit.errors import StateMismatchError, UnsupportedValueError
from resumekit.serialization.encoding import as_numbers, plain_tree
from resumekit.serialization.tensors import (
    StatePath,
    StoredSubclass,
    is_class_of_parts,
    is_subclass,
    parts_of,
)


def described(value: Any) -> str:
    """Equal for tensors made of others that differ in nothing but the elements of inner tensors."""
    made_of = parts_of(value)
    try:
        context = json.dumps(plain_tree(made_of.context, where=""))
    except UnsupportedValueError:
        context = repr(made_of.context)
    parts = (
        f"{name}: {described(part) if is_subclass(part) else _plain(part)}"
        for name, part in made_of.parts.items()
    )
    return f"{made_of.name} {made_of.size} {context} of {', '.join(parts)}"


def _plain(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def rebuilt(value: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor of the same class and context, of converted parts."""
    made_of = parts_of(value)
    parts = {name: convert(part) for name, part in made_of.parts.items()}
    made: Tensor = _unflatten(type(value), made_of, parts)
    return made


def _unflatten(kind: Any, made_of: StoredSubclass, parts: Mapping[str, Tensor]) -> Any:
    size = torch.Size(made_of.size)
    return kind.__tensor_unflatten__(parts, made_of.context, size, made_of.strides)


class Builder:
    """Builds the tensors of a state that are made of others; changes nothing.

    Args:
        key: of the component, for errors.
        live: gives the live state, whose classes may be used.
    """

    def __init__(self, key: str, live: Callable[[], Any]) -> None:
        self._key = key
        self._live = live

    def build(self, state: Any, path: StatePath | None = None) -> Any:
        """The state with tensors of the class that each was saved with.

        Args:
            state: nested state.
            path: of it; by default the component's.

        Raises:
            StateMismatchError: there is no such class, or it makes something else of the parts.
        """
        path = path or StatePath(self._key)
        if isinstance(state, StoredSubclass):
            return self._tensor(state, path)
        if isinstance(state, dict):
            made = {key: self.build(each, path.key(key)) for key, each in state.items()}
            if all(made[key] is each for key, each in state.items()):
                return state
            other = copy.copy(state)
            for key, each in made.items():  # the update() of a Counter adds
                other[key] = each
            return other
        if not isinstance(state, list | tuple | deque) or _has_numbers(state):
            return state
        items = [self.build(each, path.index(number)) for number, each in enumerate(state)]
        if all(a is b for a, b in zip(items, state, strict=True)):
            return state
        if isinstance(state, deque):
            return deque(items, state.maxlen)
        return items if isinstance(state, list) else getattr(type(state), "_make", tuple)(items)

    def _tensor(self, stored: StoredSubclass, path: StatePath) -> Any:
        kind, expected = self._classes.get(stored.name), described(stored)
        if kind is None:
            raise StateMismatchError(
                str(path),
                found=f"a tensor of class {stored.name:.200}, which no live tensor has",
                expected="one of torch.serialization.get_safe_globals(), or of the live state",
                remedy="Import it before the resume, and add it with "
                "torch.serialization.add_safe_globals if its library does not",
            )
        parts = {n: self.build(part, path.attribute(n)) for n, part in stored.parts.items()}
        made = None
        try:
            made = _unflatten(kind, stored, parts)
            found = described(made)
        except Exception as error:  # noqa: BLE001 - the code of the class raises anything
            found = f"{error!r:.200}"
        if found != expected:
            raise StateMismatchError(
                str(path),
                found=f"the class makes {found} of {expected}",
                expected="a tensor that is made of the same again",
                remedy="Install the version of its library that wrote the checkpoint",
            )
        return made

    @cached_property
    def _classes(self) -> dict[str, Any]:
        safe: Any = torch.serialization.get_safe_globals()
        known = [each for each in safe if isinstance(each, type) and is_class_of_parts(each)]
        known += map(type, _live_subclasses(self._live()))
        return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in known}


def _live_subclasses(value: Any) -> Iterator[Tensor]:
    """The tensors made of others in nested live state, and in each other."""
    if is_subclass(value):
        yield value
        value = parts_of(value).parts
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | deque) and not _has_numbers(value):
        for each in value:
            yield from _live_subclasses(each)


def _has_numbers(value: Any) -> bool:
    return isinstance(value, list) and as_numbers(value) is not None
