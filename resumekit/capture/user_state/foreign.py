"""What is saved elsewhere: the models, optimizers and tensors of other components."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Set
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from resumekit.capture.model import modules_in
from resumekit.capture.user_state.attributes import Holder, registered, tensors_in_state_dict
from resumekit.capture.user_state.value_types import (
    Kind,
    kind_of,
    parts_in,
    parts_of_tensor,
    sort_of,
    wraps_others,
)

# What a resume makes or fills without an object of the launch.
_ALWAYS_MADE = frozenset({Kind.SCALAR, Kind.CONSTANT, Kind.BUFFER, Kind.CONTAINER, Kind.ARRAY})


class Foreign:
    """Objects that are saved elsewhere, and the memory of their tensors.

    Args:
        given: the objects.
        holders: the roots; those with ``is_component`` are entered, and their tensors are foreign.
        named: those that a value may refer to, by the keys of their components.
        made: the ids of objects that were not saved elsewhere at first: a part of a model that is
            one of them is no part of it when a resumed launch begins.
    """

    def __init__(
        self,
        given: Iterable[Any],
        holders: Iterable[Holder],
        named: Mapping[str, Any],
        made: Container[int],
    ) -> None:
        self._named, self._made = named, made
        self._keys = {id(each): key for key, each in named.items()}
        roots = [each.value for each in holders if each.is_component]
        self._inside = [module for root in roots for module in modules_in(root)]
        self.of_components = {id(module) for module in self._inside}
        self._ids: set[int] = set()
        self._tensors: list[Tensor] = []
        self._outside: list[nn.Module] = []
        self._memory: set[int] | None = None  # until a tensor is looked for
        for each in given:
            if isinstance(each, nn.Module):
                if id(each) not in self._ids:  # else it was added with the module that contains it
                    # Of a component's module, the non-persistent buffers are not saved.
                    outside = [m for m in modules_in(each) if id(m) not in self.of_components]
                    self._ids.update(map(id, outside))
                    self._outside += outside
            elif isinstance(each, Tensor):
                self._tensors.append(each)
            elif each is not None:
                self._ids.add(id(each))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules among them, with their submodules."""
        return [*self._inside, *self._outside]

    def _addresses(self) -> Iterator[int]:
        """Of the memory of their tensors."""
        yield from map(address_of, self._tensors)
        for module in self._outside:
            for what in ("parameters", "buffers"):
                tensors = registered(module, what).values()
                yield from (address_of(each) for each in tensors if each is not None)
        for module in self._inside:
            yield from map(address_of, tensors_in_state_dict(module))

    def name_of(self, value: Any) -> str | None:
        """Which of the named ones a value is, the same in each launch; None for any other value.

        It is the key of the component, and of a module or a parameter in it also the path there.
        """
        key = self._keys.get(id(value))
        if key is None and isinstance(value, (nn.Module, nn.Parameter)):
            key = self._names_of_parts.get(id(value))
        return key

    def named(self, name: str) -> Any:
        """What has this name; None where nothing has."""
        return self._named.get(name, self._parts.get(name))

    @cached_property
    def _parts(self) -> Mapping[str, Any]:
        modules = {key: each for key, each in self._named.items() if isinstance(each, nn.Module)}
        return {
            f"{key}.{path}": part
            for key, each in modules.items()
            for path, part in (*each.named_modules(), *each.named_parameters())
            if path and id(part) not in self._made
        }

    @cached_property
    def _names_of_parts(self) -> Mapping[int, str]:
        return {id(part): name for name, part in self._parts.items()}

    def sorts_in(self, value: Any) -> dict[str, int]:
        """How many objects of each sort a value is made of, containers and plain values apart."""
        parts = (each for each in parts_in(value) if kind_of(each) not in _ALWAYS_MADE)
        return Counter(map(self.sort_of, parts))

    def sort_of(self, value: Any) -> str:
        """The sort of an object; of a tensor also whether it is a view."""
        return f"view: {sort_of(value)}" if self.has_view(value) else sort_of(value)

    def has_view(self, value: Any) -> bool:
        """Whether it is a tensor in the memory of one that is saved elsewhere, and not that one."""
        return isinstance(value, Tensor) and value in self and id(value) not in self._tensor_ids

    @cached_property
    def _tensor_ids(self) -> Set[int]:
        of_modules = (
            id(each)
            for module in self.modules
            for what in ("parameters", "buffers")
            for each in registered(module, what).values()
        )
        return {*map(id, self._tensors), *of_modules}

    def __contains__(self, value: Any) -> bool:
        """Whether a value is one of them, or a tensor that begins in the memory of one."""
        if not isinstance(value, Tensor):
            return id(value) in self._ids
        if self._memory is None:
            self._memory = set(self._addresses())
        return bool(self._memory) and address_of(value) in self._memory


def trained_parameters(objects: Iterable[Any]) -> Iterator[Tensor]:
    """The parameters of the optimizers among some objects, which are saved with them."""
    for each in objects:
        for group in getattr(each, "param_groups", None) or ():
            yield from group["params"]


def address_of(tensor: Tensor) -> int:
    """Where its storage begins; of a tensor without memory of its own, which object it is."""
    inner = parts_of_tensor(tensor)[0] if wraps_others(tensor) else tensor
    is_plain = type(inner) in (Tensor, nn.Parameter) and inner.layout is torch.strided
    address = inner.untyped_storage().data_ptr() if is_plain else 0
    return address or id(tensor)
