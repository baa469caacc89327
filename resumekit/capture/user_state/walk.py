"""Finds every slot that is reachable from the root objects, and digests its value."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from resumekit.capture.naming import modules_in
from resumekit.capture.restore import class_name
from resumekit.capture.user_state.attributes import (
    Holder,
    Role,
    Slot,
    contents,
    registered,
    submodules,
    tensors_in_state_dict,
    without_wrappers,
)
from resumekit.capture.user_state.digests import (
    Content,
    OverLimitError,
    UncapturedError,
    number_digest,
    size_of,
)
from resumekit.capture.user_state.value_types import (
    LIBRARIES,
    Kind,
    attributes_set_by,
    class_of,
    is_secret,
    kind_of,
    top_package,
)
from resumekit.state import CaptureLine, Fidelity, Stateful

# None of these is a secret, or entered, or large.
_NUMBERS = frozenset({bool, int, float, complex, type(None)})

_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})

_MAX_COMPUTED_ELEMENTS = 1 << 16  # larger tensors with a graph are the output of a forward pass


class Problem(NamedTuple):
    """Why the content of a slot cannot be digested.

    Args:
        reason: what it is, in words.
        num_bytes: its size, where that is the reason.
    """

    reason: str
    num_bytes: int = 0

    def line(self, path: str, fidelity: Fidelity) -> CaptureLine:
        """The line of the capture report for a slot that has this problem."""
        remedy = f'pass transient={{"{path}"}}'
        if self.num_bytes:
            size = f"{self.num_bytes / 1e6:.0f} MB"
            return CaptureLine(path, fidelity, f"{size}, {self.reason}: raise it, or {remedy}")
        remedy = f"keep it in an object with state_dict, or {remedy}"
        return CaptureLine(path, fidelity, f"{self.reason}; {remedy}")


def over_limit(num_bytes: int) -> Problem:
    """That a value is too large."""
    return Problem("above user_state_limit", num_bytes)


class Seen(NamedTuple):
    """What a walk found in a slot.

    Args:
        slot: the slot.
        owner: the path of its owner.
        value: what it held.
        digest: of its content; equal digests, equal content.
        is_plain: whether it holds builtin values alone.
        is_ignored: whether it holds what is never entered, or is saved elsewhere.
        problem: why it has no digest.
        num_bytes: that were digested, about.
    """

    slot: Slot
    owner: str
    value: Any
    digest: Any
    is_plain: bool
    is_ignored: bool
    problem: Problem | None
    num_bytes: int = 0

    @property
    def is_known(self) -> bool:
        """Whether its content was digested."""
        return self.problem is None and not self.is_ignored

    @property
    def is_unsaved(self) -> bool:
        """Whether it has no visible content."""
        if self.problem is not None:
            return True
        return not (self.is_ignored or self.is_plain) and kind_of(self.value) is Kind.OPAQUE


@dataclass(frozen=True)
class Scope:
    """What is user state and what is not.

    Args:
        foreign: gives objects that are saved elsewhere: models, optimizers, their parameters. What
            shares memory with them is left out.
        transient: attribute paths, or ends of them, that are left out.
        limit_bytes: of Python objects that are digested, about, all values together.
        memory_bytes: of tensors and arrays that are digested, all values together.
    """

    foreign: Callable[[], Iterable[Any]] = tuple
    transient: Collection[str] = ()
    limit_bytes: int = 256 * 10**6
    memory_bytes: int = 256 * 10**6

    def is_transient(self, path: str) -> bool:
        """Whether the user has named this path, its end, or an object above it."""
        if not self.transient:
            return False
        dotted = f".{path.replace('[', '.[')}."
        return any(f".{name.replace('[', '.[')}." in dotted for name in self.transient)


@dataclass
class Walk:
    """Everything that one walk found.

    Args:
        foreign: what is saved elsewhere.
        seen: the slots, by path.
        objects: every object that has slots, by path.
        paths: the path of each of them, by id.
        read_ahead: the paths of those that a loader uses ahead of the run.
    """

    foreign: Foreign
    seen: dict[str, Seen] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    read_ahead: set[str] = field(default_factory=set)

    def kinds(self) -> dict[str, str]:
        """The class of each object, by path."""
        return {path: class_name(value) for path, value in self.objects.items()}

    def unsaved(self) -> set[str]:
        """The paths of values without visible content."""
        return {path for path, each in self.seen.items() if each.is_unsaved}

    def of(self, owner: str) -> Iterator[Seen]:
        """The slots of one object."""
        return (each for each in self.seen.values() if each.owner == owner)


def walk(holders: Mapping[str, Holder], scope: Scope, *, ignore_floats: bool = False) -> Walk:
    """Finds and digests the user state that is reachable from the root objects.

    Searches breadth first, to keep paths short.

    Args:
        holders: the root objects, by name.
        scope: what is left out.
        ignore_floats: digest each Python float as the same one: some are read from a clock.
    """
    walker = _Walker(holders, scope, ignore_floats=ignore_floats)
    found = walker.run()
    vars(walker).clear()  # it and its digests refer to each other, and to all that was found
    return found


def content_digest(value: Any, *, limit_bytes: int, foreign: Collection[Any] = ()) -> int | None:
    """A number that changes when the content of an object does.

    It depends on the order of elements, and cycles are no problem. Attributes are read from
    ``__dict__`` and ``__slots__``; what is never entered, as a logger, counts as constant. An
    object of a library with ``state_dict``, as an optimizer, is its state.

    Args:
        value: any object.
        limit_bytes: the most that is digested: of Python objects, and of tensors and arrays.
        foreign: objects that count as constant wherever they occur in it.

    Returns:
        The digest; None where the content is larger, or a part of it cannot be read.
    """
    if kind_of(value) is Kind.LEAF:
        if not isinstance(value, Stateful) or isinstance(value, type):
            return None
        value = value.state_dict()
    scope = Scope(lambda: foreign, limit_bytes=limit_bytes, memory_bytes=limit_bytes)
    seen = walk({"it": Holder(SimpleNamespace(value=value))}, scope).seen
    if any(each.is_unsaved for each in seen.values()):
        return None
    texts = (f"{path}\0{each.digest}\n" for path, each in seen.items())
    return xxhash.xxh3_64_intdigest("".join(texts).encode("utf-8", "surrogatepass"))


class _Walker:
    def __init__(self, holders: Mapping[str, Holder], scope: Scope, *, ignore_floats: bool) -> None:
        self._scope = scope
        self._foreign = Foreign(scope.foreign(), holders.values())
        self._found = Walk(self._foreign)
        self._waiting: deque[tuple[str, Any, Holder]] = deque()
        self._content = Content(
            self.path_of,
            self._foreign,
            scope.limit_bytes,
            scope.memory_bytes,
            ignore_floats=ignore_floats,
        )
        self._ignores_floats = ignore_floats
        self._holder = Holder(None)
        for name, holder in holders.items():
            value = without_wrappers(holder.value)
            if id(value) not in self._found.paths:
                self._add(name, value, holder)

    def run(self) -> Walk:
        while self._waiting:
            path, value, self._holder = self._waiting.popleft()
            in_component = id(value) in self._foreign.of_components
            bookkeeping = _bookkeeping_of(value)
            for slot, content in contents(value, self._holder, in_component=in_component):
                if slot.name not in bookkeeping or slot.role is not Role.ATTRIBUTE:
                    self._look_at(slot, content, path)
            if isinstance(value, nn.Module):
                for name, each in submodules(value):
                    self.path_of(each, f"{path}.{name}")
        return self._found

    def path_of(self, value: Any, path: str) -> str | None:
        """The path of an object with slots, which is walked later; None where it is left out."""
        value = without_wrappers(value)
        known = self._found.paths.get(id(value))
        if known is not None:
            return known
        if value in self._foreign or self._scope.is_transient(path):
            return None
        self._add(path, value, self._holder)
        return path

    def _add(self, path: str, value: Any, holder: Holder) -> None:
        self._found.paths[id(value)] = path
        self._found.objects[path] = value
        if holder.is_read_ahead:
            self._found.read_ahead.add(path)
        self._waiting.append((path, value, holder))

    def _is_data_only(self, slot: Slot) -> bool:
        """Whether plain values are no state: those that library code sets, caches and counters."""
        if self._holder.data_only:
            return True
        if slot.role is not Role.ATTRIBUTE or isinstance(slot.owner, nn.Module):
            return False
        kind = class_of(slot.owner)
        is_derived = top_package(kind) not in LIBRARIES
        return is_derived and slot.name in attributes_set_by(LIBRARIES, kind)

    def _look_at(self, slot: Slot, value: Any, owner: str) -> None:
        path = slot.label(owner)
        if self._scope.transient and self._scope.is_transient(path):
            return
        if type(value) in _NUMBERS:  # most of them
            if not self._is_data_only(slot):
                number = number_digest(value, ignore_floats=self._ignores_floats)
                self._found.seen[path] = Seen(slot, owner, value, number, True, False, None)
        elif not is_secret(slot.name, value):
            self._look_into(value, slot, path, owner)

    def _look_into(self, value: Any, slot: Slot, path: str, owner: str) -> None:
        if self._is_ignored(value):
            self._found.seen[path] = Seen(slot, owner, value, "ignored", False, True, None)
            return
        content = self._content
        before = content.num_left
        digest: Any = None
        problem: Problem | None = None
        try:
            digest = content.digest(value, path, has_generators=self._holder.has_generators)
        except OverLimitError:
            problem = over_limit(size_of(value))
        except UncapturedError as error:
            problem = Problem(str(error))
        if problem or not (content.is_plain and self._is_data_only(slot)):
            size = before - content.num_left
            seen = Seen(slot, owner, value, digest, content.is_plain, False, problem, size)
            self._found.seen[path] = seen

    def _is_ignored(self, value: Any) -> bool:
        kind = kind_of(value)
        if kind is Kind.SCALAR:
            return False
        if kind is Kind.LEAF or value in self._foreign:
            return True
        if kind is Kind.GENERATOR:
            return not self._holder.has_generators
        is_computed = kind is Kind.TENSOR and value.grad_fn is not None
        return is_computed and value.numel() > _MAX_COMPUTED_ELEMENTS


def _bookkeeping_of(owner: Any) -> Collection[str]:
    """What a framework keeps in the user's modules; its adapter saves what counts."""
    if not isinstance(owner, nn.Module):
        return ()
    return attributes_set_by(_LIGHTNING, class_of(owner))


class Foreign:
    """Objects that are saved elsewhere, and the memory of their tensors.

    Args:
        given: the objects.
        holders: the roots; those with ``is_component`` are entered, and their tensors are foreign.
    """

    def __init__(self, given: Iterable[Any], holders: Iterable[Holder]) -> None:
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

    def _addresses(self) -> Iterator[int]:
        """Of the memory of their tensors."""
        yield from map(_address, self._tensors)
        for module in self._outside:
            for what in ("parameters", "buffers"):
                tensors = registered(module, what).values()
                yield from (_address(each) for each in tensors if each is not None)
        for module in self._inside:
            yield from map(_address, tensors_in_state_dict(module))

    def __contains__(self, value: Any) -> bool:
        """Whether a value is one of them, or a tensor that begins in the memory of one."""
        if not isinstance(value, Tensor):
            return id(value) in self._ids
        if self._memory is None:
            self._memory = set(self._addresses())
        return bool(self._memory) and _address(value) in self._memory


def trained_parameters(objects: Iterable[Any]) -> Iterator[Tensor]:
    """The parameters of the optimizers among some objects, which are saved with them."""
    for each in objects:
        for group in getattr(each, "param_groups", None) or ():
            yield from group["params"]


def _address(tensor: Tensor) -> int:
    """Where its storage begins; of a tensor without memory of its own, which object it is."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    address = tensor.untyped_storage().data_ptr() if is_plain else 0
    return address or id(tensor)
