"""What is no user state: what is saved elsewhere, what libraries set, what looks like a secret."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Set
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from resumekit.capture.model import modules_in
from resumekit.capture.user_state.value_types import (
    Kind,
    kind_of,
    parts_in,
    parts_of_tensor,
    sort_of,
    top_package,
    word_set,
    wraps_others,
)

# What a resume makes or fills without an object of the launch.
_ALWAYS_MADE = frozenset({Kind.SCALAR, Kind.CONSTANT, Kind.BUFFER, Kind.CONTAINER, Kind.ARRAY})


class Foreign:
    """Objects that are saved elsewhere, and the memory of their tensors.

    Args:
        given: the objects.
        roots: modules whose ``state_dict`` is saved elsewhere, and that are entered all the same.
        named: those that a value may refer to, by the keys of their components.
        made: the ids of objects that were not saved elsewhere at first: a part of a model that is
            one of them is no part of it when a resumed launch begins.
    """

    def __init__(
        self,
        given: Iterable[Any],
        roots: Iterable[nn.Module],
        named: Mapping[str, Any],
        made: Container[int],
    ) -> None:
        self._named, self._made = named, made
        self._keys = {id(each): key for key, each in named.items()}
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
        if key is None and isinstance(value, (nn.Module, Tensor)):  # is it a Parameter: slow to ask
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


def registered(module: nn.Module, what: str) -> Any:
    """What a module itself registers, values that are None included.

    Args:
        module: the module.
        what: ``"parameters"``, ``"buffers"``, ``"modules"`` or ``"non_persistent_buffers_set"``.
    """
    # torch 2.13 nn/modules/module.py Module.__init__ makes them under these names with a "_".
    return getattr(module, f"_{what}")


KINDS_OF_TENSORS = ("parameter", "buffer")


def tensors_in_state_dict(module: nn.Module) -> Iterator[Any]:
    """The parameters and persistent buffers of a module itself."""
    yield from (each for _, _, each in named_in_state_dict(module))


def named_in_state_dict(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Kind, name and value of each of them."""
    loose = registered(module, "non_persistent_buffers_set")
    for kind in KINDS_OF_TENSORS:
        for name, each in registered(module, f"{kind}s").items():
            if each is not None and name not in loose:
                yield kind, name, each


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


# ---------------------------------------------------------------- set by libraries


def attributes_set_by(libraries: frozenset[str], kind: Any) -> frozenset[str]:
    """The names of the attributes that the code of some libraries sets in objects of a class.

    They are read from the bytecode of the base classes, so what is left is the user's in every
    version. A hand-kept list would hold 87 names for transformers' Trainer 5.23, 181 for TRL's
    GRPOTrainer 1.16 and 21 for LightningModule 2.6. Reading takes up to 0.3 s, once for each class.

    Args:
        libraries: the names of their top-level packages.
        kind: the class.
    """
    return _of_class(libraries, kind)


@functools.cache
def _of_class(libraries: frozenset[str], kind: Any) -> frozenset[str]:
    return _set_in(tuple(each for each in kind.__mro__ if top_package(each) in libraries))


def attributes_set_in(value: Any, method: str) -> frozenset[str]:
    """The names of the attributes that one method of an object sets; none where it has no such.

    Args:
        value: the object.
        method: the method's name.
    """
    return frozenset(_set_by_member(inspect.getattr_static(type(value), method, None)))


@functools.cache
def _set_in(kinds: tuple[type, ...]) -> frozenset[str]:
    members = (member for each in kinds for member in vars(each).values())
    return frozenset(name for member in members for name in _set_by_member(member))


def _set_by_member(member: Any) -> Iterator[str]:
    """What a function sets, whatever it is decorated with."""
    accessors = [getattr(member, name, None) for name in ("fget", "fset", "__func__", "func")]
    for each in (member, *accessors):
        code = getattr(inspect.unwrap(each), "__code__", None) if callable(each) else None
        if code is not None:
            yield from _set_by(code)


def _set_by(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _set_by(constant)


# ---------------------------------------------------------------- secrets

_ALWAYS_SECRET = word_set("apikey credential credentials passphrase passwd password pwd secret")
_SECRET_KEYS = word_set(
    """
    access account api auth aws client encryption hf hub license private secret service session
    signing ssh storage wandb
    """
)
_TOKENS_OF_TEXT = word_set(
    """
    bos cls current decoder end eos first forced image last mask new next pad per prev previous
    sep special start stop think unk
    """
)


def is_secret(name: str, value: Any) -> bool:
    """Whether an attribute looks like a secret: by the last words of its name, and text in it.

    ``hf_token``, ``api_key`` and ``password`` do; ``tokens``, ``token_count``, ``pad_token``,
    ``sort_key`` and ``key_padding`` do not, and a number never does.
    """
    return _names_secret(name) and _holds_text(value)


@functools.cache
def _names_secret(name: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = [*filter(None, snake.split("_"))]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _TOKENS_OF_TEXT
    if last == "key":
        return not before or before in _SECRET_KEYS
    return last in _ALWAYS_SECRET


def _holds_text(value: Any) -> bool:
    """Whether it is text, or a container with some."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return any(isinstance(each, (str, bytes)) and each for each in items)
    return isinstance(value, (str, bytes)) and bool(value)
