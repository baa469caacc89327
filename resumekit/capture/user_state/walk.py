"""Finds every slot that is reachable from the root objects, and digests its value."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from resumekit.capture.nested_state import class_name
from resumekit.capture.user_state.attributes import (
    Holder,
    Role,
    ValueSlot,
    contents,
    has_extra_state,
    hooks_of,
    submodules,
    without_wrappers,
)
from resumekit.capture.user_state.digests import (
    MAX_OBJECTS,
    NESTED,
    TOO_MANY,
    Content,
    OverLimitError,
    UncapturedError,
    plain_digest,
    size_of,
)
from resumekit.capture.user_state.exclusions import Foreign, attributes_set_by, is_secret
from resumekit.capture.user_state.memory import Clusters
from resumekit.capture.user_state.value_types import (
    CODE,
    LIBRARIES,
    Kind,
    class_of,
    is_library,
    is_object_of_library,
    is_user_object,
    kind_of,
    names_in,
    parts_in,
    sort_of,
    top_package,
)
from resumekit.live.frames import is_library_file
from resumekit.state import CaptureLine, Fidelity, Stateful

_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})
# The user's, though a library sets it: lightning 2.6 core/mixins/hparams_mixin.py ``hparams``.
_OF_USER = frozenset({"_hparams"})

_WITH_HOOKS = (Optimizer, Tensor, nn.Module)

_MAX_COMPUTED_ELEMENTS = 1 << 16  # larger tensors with a graph are the output of a forward pass


# Of the objects of libraries that a training reaches, the nearest ones are walked: from a plot, a
# request or a test there may be a way to all that a program has.
_MAX_OF_LIBRARIES = 2_000

_DIGESTED_FACTOR = 16  # tensors and arrays that are digested, per byte that may be saved


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
        memory: the tensors and arrays in it.
        views: where in those of other slots, or in each other, these lie.
    """

    slot: ValueSlot
    owner: str
    value: Any
    digest: Any
    is_plain: bool
    is_ignored: bool
    problem: Problem | None
    num_bytes: int = 0
    memory: Sequence[Any] = ()
    views: tuple[Any, ...] = ()

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
        named: gives those that a value may refer to, by the keys of their components.
        transient: attribute paths, or ends of them, that are left out.
        limit_bytes: of Python objects that are digested, about, all values together.
        memory_bytes: of tensors and arrays that are digested, all values together.
        code: gives functions and classes that are entered, as is all code that these reach. Without
            it none is: of the user states of a run, one follows the code for all.
    """

    foreign: Callable[[], Iterable[Any]] = tuple
    named: Callable[[], Mapping[str, Any]] = dict
    transient: Collection[str] = ()
    limit_bytes: int = 256 * 10**6
    memory_bytes: int = 256 * 10**6
    code: Callable[[], Iterable[Any]] | None = None

    def limited(self, transient: Collection[str], limit_bytes: int) -> Scope:
        """The same with these options of the run."""
        return replace(
            self,
            transient=frozenset(transient),
            limit_bytes=limit_bytes,
            memory_bytes=_DIGESTED_FACTOR * limit_bytes,
        )

    @cached_property
    def _last_parts(self) -> Collection[str]:
        return {name.replace("[", ".").rpartition(".")[2] for name in self.transient}

    def leaves_out(self, slot: ValueSlot, path: str) -> bool:
        """Whether the user has named this slot of an object that is not named."""
        if not self.transient:
            return False
        may_be = slot.name in self._last_parts or slot.role is Role.REQUIRES_GRAD
        return may_be and self.is_transient(path)

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
        wrappers: the wrappers of modules among them, by the module's path and their own class.
        makers: the functions and classes that make the objects with hidden state, by name.
        code: the functions and classes that were met and not entered, by id.
        entered: the code of the functions whose globals were looked at.
        is_cut: whether there are more objects than are walked.
        names: of the globals that functions use, by the path of their module.
        listed: the paths of modules that are values of a ModuleList.
        trusted: the paths of objects with ``state_dict``, and of those that they lead to: their
            state has what nothing else can read, and their attributes are what it may lack.
        clusters: of the tensors and arrays that share memory.
    """

    foreign: Foreign
    seen: dict[str, Seen] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    wrappers: dict[tuple[str, str], nn.Module] = field(default_factory=dict)
    makers: Mapping[str, Any] = field(default_factory=dict)
    code: dict[int, Any] = field(default_factory=dict)
    entered: set[CodeType] = field(default_factory=set)
    is_cut: bool = False
    names: dict[str, set[str]] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    trusted: set[str] = field(default_factory=set)
    clusters: Clusters = field(default_factory=lambda: Clusters([]))

    def kinds(self) -> dict[str, str]:
        """The sort of each object, by path."""
        return {path: sort_of(value) for path, value in self.objects.items()}

    def unsaved(self) -> set[str]:
        """The paths of values without visible content."""
        return {path for path, each in self.seen.items() if each.is_unsaved}

    def moved_views(
        self, former: Mapping[str, tuple[Any, ...]], known: Container[str]
    ) -> list[str]:
        """The slots of known owners that share memory with others than before, by path."""
        found = []
        for path in (path for path in {**former, **self.clusters.views()} if path in self.seen):
            before = tuple(each for each in former.get(path, ()) if each[0] in self.seen)
            if self.seen[path].views != before and self.seen[path].owner in known:
                found.append(path)
        return found

    @cached_property
    def by_owner(self) -> Mapping[str, list[Seen]]:
        """The slots of each object, by its path."""
        found: dict[str, list[Seen]] = defaultdict(list)
        for each in self.seen.values():
            found[each.owner].append(each)
        return found


Paths = Mapping[int, tuple[str, ReferenceType[Any]]]  # of objects, by id


def paths_of(objects: Mapping[str, Any]) -> Paths:
    """The path of each object that a weak reference can have; code is named by its module."""
    return {
        id(each): (path, ref(each))
        for path, each in objects.items()
        if class_of(each).__weakrefoffset__ and kind_of(each) not in CODE
    }


def walk(
    holders: Mapping[str, Holder],
    scope: Scope,
    *,
    ignore_floats: bool = False,
    too_large: Mapping[str, int] | None = None,
    paths: Paths | None = None,
) -> Walk:
    """Finds and digests the user state that is reachable from the root objects.

    Searches breadth first, to keep paths short.

    Args:
        holders: the root objects, by name.
        scope: what is left out.
        ignore_floats: digest each Python float as the same one: some are read from a clock.
        too_large: the ids of values of too many objects, which are not looked at again, by path.
        paths: that objects have had; they keep them, where a shorter way leads to them now.
    """
    walker = _Walker(holders, scope, too_large or {}, paths or {}, ignore_floats=ignore_floats)
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
    if kind_of(value) in (Kind.LEAF, Kind.NAMED):
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
    def __init__(
        self,
        holders: Mapping[str, Holder],
        scope: Scope,
        too_large: Mapping[str, int],
        former: Paths,
        *,
        ignore_floats: bool,
    ) -> None:
        self._scope, self._too_large, self._former = scope, too_large, former
        roots = [each.value for each in holders.values() if each.is_component]
        self._foreign = Foreign(scope.foreign(), roots, scope.named(), former)
        self._found = Walk(self._foreign)
        self._is_of_library = False  # the object whose slots are looked at
        self._left_out: Collection[str] = ()  # its attributes that a framework's adapter saves
        self._data_only: Collection[str] = ()  # those whose plain values are no state
        self._num_of_libraries = 0  # objects
        self._num_digested = 0  # values in them
        self._used: set[tuple[int, tuple[str, ...]]] = set()  # the globals that were looked at
        self._types: set[type] = set()  # of the objects that were looked at
        self._waiting: deque[tuple[str, Any, Holder]] = deque()
        limits = scope.limit_bytes, scope.memory_bytes
        self._content = Content(self.path_of, self._foreign, *limits, ignore_floats)
        self._ignores_floats = ignore_floats
        self._holder = Holder(None)
        for name, holder in holders.items():
            value = without_wrappers(holder.value)
            if id(value) not in self._found.paths:
                self._add(name, value, holder)
        for each in scope.code() if scope.code else ():
            self._enter(each, getattr(each, "__qualname__", ""))

    def run(self) -> Walk:
        while self._waiting:
            path, value, self._holder = self._waiting.popleft()
            self._is_of_library = is_object_of_library(class_of(value))
            in_component = id(value) in self._foreign.of_components
            is_saved = value is self._holder.value and self._holder.is_saved
            self._left_out, self._data_only = (), ()
            if isinstance(value, nn.Module):
                self._left_out = attributes_set_by(_LIGHTNING, type(value)) - _OF_USER
                for name, each in submodules(value):
                    self.path_of(each, f"{path}.{name}")
            elif top_package(class_of(value)) not in LIBRARIES:
                self._data_only = attributes_set_by(LIBRARIES, class_of(value))
            if self._has_state(value):  # its submodules are none of it
                self._holder = replace(self._holder, is_trusted=True, attributes_only=False)
            if self._holder.is_trusted:
                self._found.trusted.add(path)
            slots = contents(value, self._holder, in_component=in_component, is_saved=is_saved)
            for slot, content in [*slots]:  # to look at a value may add attributes to its class
                self._look_at(slot, content, path)
                if slot.role is Role.MODULES:
                    self._found.listed.update(f"{path}.{name}" for name in content)
            self._follow(value, path)
        found = self._found
        found.makers = self._content.makers
        values = [(path, each) for path, seen in found.seen.items() for each in seen.memory]
        found.clusters = Clusters(values)
        for path, views in found.clusters.views().items():
            found.seen[path] = found.seen[path]._replace(views=views)
        return found

    def _has_state(self, value: Any) -> bool:
        """Whether an object gives a state of its own, which is saved where it is referred to."""
        if isinstance(value, nn.Module):
            return has_extra_state(value)
        is_elsewhere = value is self._holder.value and self._holder.attributes_only
        return kind_of(value) is Kind.STATEFUL and not is_elsewhere

    def _follow(self, value: Any, path: str) -> None:
        """What an object leads to besides its slots."""
        kind = kind_of(value)
        if kind is Kind.FUNCTION:
            self._enter(vars(value).get("__wrapped__"), path)
            self._use_globals(value.__code__, value.__globals__)
        elif kind is Kind.CLASS:
            for code in _code_of(value):
                self._enter(code, path)
            members = value.__members__ if issubclass(value, Enum) else {}
            for name, each in members.items():
                self.path_of(each, f"{path}.{name}")
        elif type(value) not in self._types or isinstance(value, _WITH_HOOKS):
            self._types.add(type(value))
            self._enter(type(value), path)
            for each in hooks_of(value):
                self._enter(each, path)
        if self._holder.frame is not None and value is self._holder.value:
            self._use_globals(self._holder.frame.f_code, self._holder.frame.f_globals)

    def _enter(self, value: Any, path: str) -> None:
        """Walks an object or a function that is called, and what it is called with."""
        for each in parts_in(value):
            if kind_of(each) in (Kind.FUNCTION, Kind.CLASS) or is_user_object(each):
                self.path_of(each, path)

    def _use_globals(self, code: CodeType, scope: dict[str, Any]) -> None:
        """Looks at the globals that a function of the user's reads or writes."""
        if self._scope.code is None or is_library_file(code.co_filename):
            return
        self._found.entered.add(code)
        # Which of its own variables a running module still reads, its frame knows.
        self._use_names(names_in(code), scope, code_only=code.co_name == "<module>")

    def _use_names(
        self, names: tuple[str, ...], scope: dict[str, Any], *, code_only: bool = False
    ) -> None:
        if (id(scope), names) in self._used:
            return
        self._used.add((id(scope), names))
        path = str(scope.get("__name__"))
        self._found.objects[path] = scope
        self._found.names.setdefault(path, set()).update(() if code_only else names)
        for name in names:
            value = scope.get(name)
            if isinstance(value, ModuleType):
                if not is_library(value):
                    self._use_names(names, vars(value))
            elif kind_of(value) in CODE:
                self._enter(value, name)
            if name in scope and f"{path}.{name}" not in self._found.seen and not code_only:
                self._look_at(ValueSlot(scope, Role.GLOBAL, name), value, path)

    def path_of(self, value: Any, path: str) -> str | None:
        """The path of an object with slots, which is walked later; None where it is left out."""
        inner = without_wrappers(value)
        if inner is not value:
            found = self.path_of(inner, path)
            if found is not None:
                self._found.wrappers[found, class_name(value)] = value
            return found
        known = self._found.paths.get(id(value))
        if known is not None:
            return known
        if kind_of(value) in CODE:
            if self._scope.code is None:
                self._found.code[id(value)] = value
            if self._scope.code is None or _is_stateless(value):
                return None
            name = f"{value.__module__}.{value.__qualname__}"
            path = f"{path}.{value.__name__}" if "<" in name else name
        self._found.is_cut = self._found.is_cut or len(self._found.objects) >= MAX_OBJECTS
        if value in self._foreign or self._scope.is_transient(path) or self._found.is_cut:
            return None
        if is_object_of_library(class_of(value)):
            self._num_of_libraries += 1
            if self._num_of_libraries > _MAX_OF_LIBRARIES:
                return None
        return self._add(path, value, self._holder)

    def _add(self, path: str, value: Any, holder: Holder) -> str:
        former, reference = self._former.get(id(value), (path, None))
        if reference is not None and reference() is value:
            path = former
        while path in self._found.objects:
            path += "'"
        self._found.paths[id(value)] = path
        self._found.objects[path] = value
        self._waiting.append((path, value, holder))
        return path

    def _look_at(self, slot: ValueSlot, value: Any, owner: str) -> None:
        name, data_only = slot.name, self._holder.data_only
        if slot.role is Role.ATTRIBUTE:  # most of them
            if name in self._left_out:
                return
            path = f"{owner}.{name}"
            # Plain values that library code sets are caches and counters.
            data_only = data_only or name in self._data_only
        else:
            path = slot.label(owner)
        if is_secret(name, value) or self._scope.leaves_out(slot, path):
            return
        digest = plain_digest(value, ignore_floats=self._ignores_floats)
        is_foreign = type(value) in NESTED and value in self._foreign
        if digest is None or is_foreign:
            self._look_into(value, slot, path, owner, data_only=data_only)
        elif not data_only:
            self._found.seen[path] = Seen(slot, owner, value, digest, True, False, None)

    def _look_into(
        self, value: Any, slot: ValueSlot, path: str, owner: str, *, data_only: bool
    ) -> None:
        name = self._foreign.name_of(value)
        if name is not None:
            self._found.seen[path] = Seen(slot, owner, value, f"is {name}", False, False, None)
            return
        if self._is_ignored(value, slot) or self._is_beyond_budget or self._is_in_state(value):
            self._found.seen[path] = Seen(slot, owner, value, "ignored", False, True, None)
            return
        content = self._content
        before, content.num_skipped = content.num_left, 0
        digest: Any = None
        problem: Problem | None = None
        try:
            if self._too_large.get(path) == id(value):
                raise OverLimitError(TOO_MANY)
            digest = content.digest(value, path, has_generators=self._holder.has_generators)
        except OverLimitError as error:
            problem = Problem(str(error)) if str(error) else over_limit(size_of(value))
        except UncapturedError as error:
            problem = Problem(str(error))
        self._num_digested += content.num_objects if self._is_of_library else 0
        if self._holder.is_trusted and (problem or kind_of(value) is Kind.OPAQUE):
            self._found.seen[path] = Seen(slot, owner, value, "ignored", False, True, None)
        elif problem or not (content.is_plain and data_only):
            size = before - content.num_left + content.num_skipped
            memory = () if problem else content.memory
            seen = Seen(slot, owner, value, digest, content.is_plain, False, problem, size, memory)
            self._found.seen[path] = seen

    @property
    def _is_beyond_budget(self) -> bool:
        """Whether objects of libraries, which come after nearer ones, have used up their budget."""
        return self._is_of_library and self._num_digested > MAX_OBJECTS

    def _is_in_state(self, value: Any) -> bool:
        """Whether a component that saves the object by its ``state_dict`` is to save this."""
        if not (self._holder.is_trusted and self._holder.attributes_only):
            return False
        return any(kind_of(each) in (Kind.TENSOR, Kind.ARRAY) for each in parts_in(value))

    def _is_ignored(self, value: Any, slot: ValueSlot) -> bool:
        kind = kind_of(value)
        if kind is Kind.SCALAR:
            return False
        if kind is Kind.LEAF or value in self._foreign or slot.is_method(value):
            return True
        if kind is Kind.GENERATOR:
            return not self._holder.has_generators
        is_computed = kind is Kind.TENSOR and value.grad_fn is not None
        return is_computed and value.numel() > _MAX_COMPUTED_ELEMENTS


def _code_of(kind: type) -> Iterator[Any]:
    """The bases and the methods of a class."""
    for each in (*kind.__bases__, *vars(kind).values()):
        parts = (each, getattr(each, "fget", None), getattr(each, "__func__", None))
        yield from (part for part in parts if kind_of(part) in CODE)


def _is_stateless(code: Any) -> bool:
    """Whether a class or a function is of a library; a decorator of one may keep a function."""
    return is_library(code) and not getattr(code, "__closure__", None)
