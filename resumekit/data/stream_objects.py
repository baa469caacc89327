"""The user's objects that a loader reads: their state when the epoch began, and what changes it.

A resume inside an epoch iterates a stream, or a sampler, again from there, and starts workers with
copies of the objects, so these need that state first. What they held at the interruption is
restored after it, as user state. For a stream this is exact where only the stream changes the
objects, or where it has read all that it needs of them before its first sample.
"""

from __future__ import annotations

import copy
import dis
import gc
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from resumekit.capture.user_state.user_state import UserState, label_of
from resumekit.capture.user_state.value_types import is_object_of_library, is_user_object
from resumekit.capture.user_state.walk import content_digest
from resumekit.log import logger
from resumekit.state import Fidelity

# Makes the user state of some objects, without what other components of the run save.
MakeUserState: TypeAlias = Callable[..., UserState]

# Gives the class of the model by the id of each parameter that training changes.
FindParameters: TypeAlias = Callable[[], Mapping[int, str]]


_NUM_NAMED = 3
_MAX_MARKED = 32  # objects that are looked at before and after every batch
_MAX_DIGESTED_BYTES = 8 * 2**20  # of what the stream has read before its first sample
_PLAIN = (bool, int, float, str, type(None))
_SIZED = (list, dict, set, deque)


class ObjectsAtStart:
    """Records what the objects of a loader hold when an epoch begins, and restores it.

    Args:
        state: their user state; its baseline is what the script made.

    Attributes:
        is_complete: whether nothing of them is missing in what was recorded.
    """

    def __init__(self, state: UserState) -> None:
        self._state = state
        self._at_start: dict[str, Any] = {}
        self._replaced: dict[str, Any] | None = None  # by what ``begin`` has restored
        self._first: dict[str, Any] = {}  # digests when the epoch began
        self.is_complete = True

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        """An epoch begins: records what differs from what the script made.

        Args:
            saved: what ``state_dict`` gave in the interrupted epoch, which is restored first; None
                where a new epoch begins.

        Raises:
            StateMismatchError: it does not fit the objects.
        """
        if saved is not None:
            self._state.check_content(self._state.key, saved)
            self._replaced = self._exchange(saved)
        self._state.before_save()
        self._first = self._state.digests()
        self.is_complete = not self._state.findings()
        self._at_start = copy.deepcopy(self._state.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """What the objects held when the epoch began, where the script had not made it."""
        return self._at_start

    def set_back(self) -> None:
        """Sets what ``begin`` has restored to what it was; user state restores what differs."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None:
            self._exchange(replaced)
        self._state.always = set()

    def _exchange(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Sets a state of the objects; returns the one that they had, as far as it is another."""
        always = self._state.always
        self._state.always = always.union(map(label_of, state["slots"]))
        replaced = copy.deepcopy(self._state.state_dict())
        self._state.always = always
        self._state.load_state_dict(state)
        self._state.restore_now()
        return replaced


class LoaderContent(ObjectsAtStart):
    """What a loader that the script builds in each epoch is built from: indices, weights, samples.

    Code that a resume inside the epoch runs again may build another one, from a model that is
    further on; it is set to what it was.

    Args:
        state: of what no variable held before the epoch, without a baseline.
    """

    def __init__(self, state: UserState) -> None:
        super().__init__(state)
        self.is_as_saved = True

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            built = self._state.digests()
            then = saved.get("digests", {}).items()
            if others := [path for path, digest in then if str(built.get(path)) != digest]:
                names = ", ".join(others[:_NUM_NAMED])
                logger.info("restored what the loader of this epoch was built from: %s", names)
        super().begin(saved)
        # Those of values that are too large to be saved as well.
        now = {path: str(digest) for path, digest in self._first.items()}
        self.is_as_saved = saved is None or saved.get("digests") == now
        self._at_start = {**self._at_start, "digests": now}

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """Whether a resume has, or will have, the loader of the epoch."""
        if not self.is_as_saved:
            return Fidelity.LOST, "a loader of this epoch was built from other data at the save"
        if not self.is_complete:
            return Fidelity.UNKNOWN, (
                "a loader is built in the epoch from more than is saved; build it before epochs()"
            )
        return Fidelity.EXACT, ""


class StreamObjects(ObjectsAtStart):
    """What the objects of a stream hold when an epoch begins, and who changes them from then on."""

    def __init__(self, state: UserState) -> None:
        super().__init__(state)
        self._marks: dict[str, Any] | None = None  # None: they are about to be restored
        self._by_stream: set[str] = set()  # paths of what the stream itself changes
        self._by_training: set[str] = set()  # in this epoch
        self._changed: list[str] | None = None  # what was reported of the last batch
        self._num_batches = 0
        self._is_first_epoch = True
        self._read: list[Any] = []  # that the stream still reads after its first batch
        self._read_digest: int | None = None  # None: it reads the objects, or nobody knows

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        super().begin(saved)
        self._by_training = set()
        self._num_batches = 0
        self._changed = None
        self._marks = marks_of(self._state.objects)

    def before_batch(self) -> None:
        """Called before each batch: training changed what is new since the last one."""
        self._changed = None
        self._by_training |= self._marked()

    def after_batch(self, iterator: Any) -> None:
        """Called after each batch: the stream changed what is new since ``before_batch``.

        Args:
            iterator: that gives its samples, or batches.
        """
        self._by_stream |= self._marked()
        self._num_batches += 1
        if self._num_batches == 1:
            if self._is_first_epoch:  # what marks do not show
                self._by_stream |= _difference(self._first, self._state.digests())
                self._is_first_epoch = False
            has_changed = bool(self._by_training)  # after the epoch began, before the first read
            self._read = [] if has_changed else still_readable(iterator)
            self._read_digest = None if has_changed else self._digest_of_read()
            if self._read_digest is None:
                self._read = []  # nothing is to live longer because of this

    def replayed(self) -> None:
        """The used batches were replayed; what the objects held at the interruption follows."""
        self._marks = None

    def changed_by_training(self) -> list[str]:
        """What training has changed since the epoch began, where the stream may read it later."""
        if self._num_batches and self._changed is None:
            now = self._state.digests()
            changed = self._by_training & now.keys()
            changed |= _difference(self._first, now) - self._by_stream
            is_read = self._read_digest is None or self._read_digest != self._digest_of_read()
            self._changed = sorted(changed) if is_read else []
        return self._changed or []

    def _digest_of_read(self) -> int | None:
        objects = {id(each) for each in self._state.objects.values()}
        if any(id(each) in objects for each in self._read):
            return None
        return content_digest(self._read, limit_bytes=_MAX_DIGESTED_BYTES)

    def _marked(self) -> set[str]:
        """The paths of what looks different now than at the last call."""
        former, self._marks = self._marks, marks_of(self._state.objects)
        return set() if former in (None, self._marks) else _difference(former or {}, self._marks)


class ObjectsReadAhead:
    """What the objects held from which a batch was fetched ahead of its step, in this process.

    A resume fetches such a batch again, after it has restored the objects as they were at the save.
    What has changed in between has to be what it was: plain values are in their marks. What else
    training has changed is reported. Where a fetch may have changed more, as a cache does, the
    batch is compared with what it was.

    Args:
        state: their user state.
    """

    def __init__(self, state: UserState) -> None:
        self._state = state
        self._first: dict[str, Any] = {}

    def begin(self) -> None:
        """The first batch of an epoch is about to be fetched."""
        self._first = self._state.digests()

    def marks(self) -> dict[str, Any]:
        """To be taken before each batch."""
        return marks_of(self._state.objects)

    def plain_values(self, marks: Mapping[str, Any]) -> dict[str, Any]:
        """The plain values that were others when the marks were taken, by path."""
        now = self.marks()
        return {p: marks[p] for p in self._plain(marks, now) if marks[p] != now[p]}

    def set_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sets plain values by path; returns those that they replace."""
        replaced = {}
        for path, value in values.items():
            owner, _, name = path.rpartition(".")
            attributes = getattr(self._state.objects.get(owner), "__dict__", {})
            if name in attributes:
                replaced[path], attributes[name] = attributes[name], value
        return replaced

    def changed_since(self, marks: Mapping[str, Any]) -> list[str]:
        """What training has changed since the marks were taken, but for plain values."""
        now = self.marks()
        return sorted((_difference(marks, now) & self._first.keys()) - self._plain(marks, now))

    def have_changed(self) -> bool:
        """Whether anything has changed since the epoch's first batch."""
        return self._first != self._state.digests()

    def _plain(self, *marks: Mapping[str, Any]) -> set[str]:
        """What is a plain value of one and the same object in all of the marks."""
        plain = ({p for p, mark in each.items() if isinstance(mark, _PLAIN)} for each in marks)
        found = set.intersection(*plain) & self._first.keys()
        owners = {p: {each[p.rpartition(".")[0]] for each in marks} for p in found}
        return {p for p, ids in owners.items() if len(ids) == 1}


class ModelsInUse:
    """Which model that training changes a stream uses.

    A resume inside an epoch makes the used batches again with the weights of the interruption; what
    these were when the epoch began, nobody keeps.

    Args:
        holders: what the loader calls: what these lead to is known before the first batch.

    Attributes:
        found: the class of the model; empty while none is known.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        self._holders = [*holders]
        self._trained: Mapping[int, str] = {}
        self.found = ""

    def look(self, trained: Mapping[int, str]) -> None:
        """Looks for models in what the loader calls, and from now on in what it runs.

        Args:
            trained: the class of the model by the id of each parameter that training changes.
        """
        self._trained = trained
        for each in _leaves(self._holders, _parts_of_user):
            if isinstance(each, nn.Module):
                self._note(each)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a batch is made: sees the models that run, whatever leads to them."""
        if self.found or not self._trained:
            yield
            return
        handle = register_module_forward_pre_hook(lambda module, _: self._note(module))
        try:
            yield
        finally:
            handle.remove()

    def _note(self, module: nn.Module) -> None:
        names = (self._trained.get(id(each)) for each in module.parameters())
        self.found = self.found or next(filter(None, names), "")


def _parts_of_user(value: Any) -> Iterable[Any] | None:
    """What is used through an object of the user's, a container or a function; None for others.

    Objects of libraries are not entered: a trainer has the model, whatever it is asked for.
    """
    kind: Any = type(value)
    if isinstance(value, nn.Module) or is_object_of_library(kind):
        return None
    if isinstance(value, _SIZED):
        items = value.values() if isinstance(value, dict) else value
        return [*islice(items, _MAX_MARKED)]
    parts = _parts(value)
    return [*vars(value).values()] if parts is None and is_user_object(value) else parts


def marks_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Plain attributes, which other objects there are, and lengths: in microseconds."""
    marks: dict[str, Any] = {}
    for path, each in islice(objects.items(), _MAX_MARKED):
        marks[path] = (id(each),)
        for name, value in getattr(each, "__dict__", {}).items():
            marks[f"{path}.{name}"] = _mark(value)
    return marks


def _mark(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    return id(value), len(value) if isinstance(value, _SIZED) else 0


def _difference(former: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    return {path for path in {*former, *now} if former.get(path) != now.get(path)}


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_NAMED = frozenset((*dis.haslocal, *dis.hasfree))


def still_readable(iterator: Any) -> list[Any]:
    """The objects that an iterator can still read from.

    A stream that reads all that it needs when it starts, as a dataset over a replay buffer does,
    stays exact although training fills the buffer. Without this, strict=True would refuse it:
    test_a_stream_that_reads_at_its_start_is_not_reported.

    Of a generator, these are the local variables that the rest of its code uses, and what it
    iterates; of other built-in iterators, what they iterate. Iterators and functions among them are
    replaced by what they read, so that the result holds neither.

    Args:
        iterator: it is suspended, or was not started.
    """
    return _leaves([iterator], _parts)


def _leaves(values: Iterable[Any], parts_of: Callable[[Any], Iterable[Any] | None]) -> list[Any]:
    """The objects that values lead to and that have no parts themselves."""
    found: list[Any] = []
    waiting, met = [*values], dict[int, Any]()
    while waiting:
        value = waiting.pop()
        if id(value) in met:
            continue
        met[id(value)] = value
        parts = parts_of(value)
        if parts is None:
            found.append(value)
        else:
            waiting += parts
    return found


def _parts(value: Any) -> list[Any] | None:
    """What is read through an iterator or a function; None for any other object."""
    if isinstance(value, types.GeneratorType):
        return _read_by_generator(value)
    if isinstance(value, types.CellType):
        return gc.get_referents(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.BuiltinMethodType):  # of a list, or a function of a module
        return [] if isinstance(value.__self__, types.ModuleType) else [value.__self__]
    if isinstance(value, types.FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    is_builtin = isinstance(value, Iterator) and not type(value).__dictoffset__
    return gc.get_referents(value) if is_builtin else None


def _read_by_generator(generator: types.GeneratorType[Any, Any, Any]) -> list[Any]:
    """The values on the stack of a generator, and those of its variables that it may use again."""
    frame = generator.gi_frame
    if frame is None:
        return []  # it is over
    values = frame.f_locals
    unused = [each for name, each in values.items() if name not in _used_from(frame)]
    # CPython 3.10 Objects/frameobject.c frame_traverse and 3.11 to 3.13 Python/frame.c
    # _PyFrame_Traverse visit each variable, cell and stack entry, and these:
    machinery = (frame, values, frame.f_code, frame.f_globals, frame.f_builtins, frame.f_back)
    read: list[Any] = []
    for each in (*gc.get_referents(generator), *gc.get_referents(frame)):
        is_own_code = isinstance(each, types.FunctionType) and each.__code__ is frame.f_code
        if is_own_code or any(each is part for part in machinery):
            continue
        index = next((i for i, other in enumerate(unused) if _holds(each, other)), None)
        if index is None:
            read.append(each)
        else:
            del unused[index]
    return read


def _used_from(frame: types.FrameType) -> set[str]:
    """The variables that the code names where it may still come to."""
    used: set[str] = set()
    for each in instructions_ahead(frame):
        if each.opcode in _NAMED:
            used.update(each.argval if isinstance(each.argval, tuple) else (each.argval,))
    return used


def instructions_ahead(frame: types.FrameType) -> list[dis.Instruction]:
    """The instructions of a suspended frame that it may still come to."""
    code = [each for each in dis.get_instructions(frame.f_code) if each.opname != "EXTENDED_ARG"]
    first, former = frame.f_lasti, -1
    while first != former:  # a jump back leads to the start of a loop
        former = first
        targets = (e.argval for e in code if e.offset >= former and e.opcode in _JUMPS)
        first = min((former, *targets))
    return [each for each in code if each.offset >= first]


def _holds(referent: Any, value: Any) -> bool:
    """Whether it is the value, or the cell of a variable that holds it."""
    if isinstance(referent, types.CellType):
        return any(each is value for each in gc.get_referents(referent))
    return referent is value
