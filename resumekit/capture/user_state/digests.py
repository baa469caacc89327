"""Digests of values of user state, in the order of their elements."""

from __future__ import annotations

import copyreg
import struct
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import xxhash
from torch import Tensor

from resumekit.capture.rng import generator_state
from resumekit.capture.user_state.exclusions import Foreign
from resumekit.capture.user_state.value_types import (
    CODE,
    MAPPINGS,
    SCALARS,
    SETS,
    WEAK,
    Kind,
    cache_size,
    class_of,
    factory_of,
    is_namedtuple,
    kind_of,
    memory_of,
    parts_in,
    parts_of_call,
    parts_of_tensor,
    sort_of,
    wraps_others,
)
from resumekit.serialization.leaves import buffers_of

_OBJECT_BYTES = 64  # of a Python object in a container, about
MAX_OBJECTS = 50_000  # that are walked, and that are digested one by one in a value
TOO_MANY = f"more than {MAX_OBJECTS:,} objects"
MAX_DEPTH = 100  # of values in each other: decoding takes up to seven Python calls for each
TOO_DEEP = "nested too deeply"
_MAX_DIGESTED = 256 * 10**6  # bytes of a tensor or an array; of a larger one, samples
_NUM_SAMPLES = 1 << 16
_NUMBERS = frozenset({bool, int, float, complex, type(None)})
_PLAIN = frozenset(SCALARS)
_WITH_PATHS = CODE | {Kind.OBJECT, Kind.MODULE}
NESTED = frozenset({list, tuple, dict})
_MAX_REPR = 64  # elements of a container whose digest is its repr, characters of a text in it
_MIN_ROWS = 64  # shorter sequences are digested value by value


class OverLimitError(Exception):
    """More user state than the limit allows; the text says what, where it is not the size."""


class UncapturedError(Exception):
    """A value whose content cannot be read or stored."""

    @classmethod
    def for_value(cls, value: Any, error: Exception) -> UncapturedError:
        """That reading or storing a value raised another error; classes and rare tensors do."""
        return cls(f"a {type(value).__name__} that cannot be stored ({type(error).__name__})")


def reduced(value: Any) -> tuple[Any, Any, Any, Any, Any]:
    """What makes an equal object, as copy and pickle ask for it: see ``object.__reduce__``.

    Returns:
        A callable, its arguments, the state, the items of a list, and the pairs of a dict; where
        the object has none of these, None. Of an object that is known by its name, the name.

    Raises:
        UncapturedError: it cannot be copied.
    """
    kind = class_of(value)
    reduce = copyreg.dispatch_table.get(kind)
    found: Any
    if kind in WEAK:
        return kind, (WEAK[kind](value),), None, None, None
    try:
        found = kind.__reduce_ex__(value, 5) if reduce is None else reduce(value)
    except Exception as error:  # of a library's class
        raise UncapturedError(f"a {kind.__name__} that cannot be copied ({error})") from error
    parts = (found,) if isinstance(found, str) else found
    maker, arguments, state, items, pairs = (*parts, None, None, None, None)[:5]
    if state is None and isinstance(value, defaultdict):  # it gives none of its attributes
        state = getattr(value, "__dict__", None) or None
    return maker, arguments, state, items and list(items), pairs and list(pairs)


@dataclass
class Content:
    """Digests of values, in the order of their elements.

    Args:
        path_of: gives the path of an object with slots; None where it is left out.
        foreign: objects and tensors that are saved elsewhere.
        left: the bytes of Python objects that may still be digested, about.
        left_memory: the same of tensors and arrays.
        ignore_floats: see ``walk``.
        num_skipped: bytes of which samples were digested.
        makers: of the objects with hidden state, by name.
        num_objects: in the last value.
        is_plain: whether the last value holds builtin values alone.
        memory: the tensors and arrays in the last value.
    """

    path_of: Callable[[Any, str], str | None]
    foreign: Foreign
    left: int
    left_memory: int
    ignore_floats: bool
    num_skipped: int = 0
    makers: dict[str, Any] = field(default_factory=dict)
    num_objects: int = 0
    is_plain: bool = True
    memory: list[Any] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """The bytes that may still be digested."""
        return self.left + self.left_memory

    def digest(self, value: Any, path: str, *, has_generators: bool) -> Any:
        """A value that is equal for equal content.

        Args:
            value: of a slot.
            path: of the slot.
            has_generators: whether random generators are state.

        Raises:
            OverLimitError: it is larger than what is left of the limit.
            UncapturedError: a part of it has no visible content.
        """
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []
        self.memory, self.is_plain, self.num_objects, self._depth = [], True, 0, 0
        self._has_generators = has_generators
        if kind_of(value) is Kind.SCALAR and not isinstance(value, (str, bytes, Enum)):
            self.is_plain = False
            ignored = self.ignore_floats and isinstance(value, np.floating)
            return "float" if ignored else (type(value).__name__, repr(value))
        before = self.left, self.left_memory
        hasher = xxhash.xxh3_128()
        self._update: Callable[[Any], None] = hasher.update
        try:
            self._feed(value, path)
        except OverLimitError:
            self.left, self.left_memory = before
            raise
        except UncapturedError:
            raise
        except Exception as error:  # of a class of the user's or of a library
            raise UncapturedError.for_value(value, error) from error
        return hasher.hexdigest()

    def _feed(self, value: Any, path: str) -> None:
        """Adds the content of a value to the digest."""
        kind = kind_of(value)
        if kind is not Kind.SCALAR:
            self._update(_tag(class_of(value)))
            self.is_plain = self.is_plain and kind is Kind.CONTAINER
        if kind not in self._aliased or not self._is_met(value):
            self._feeds[kind](self, value, path)

    def _scalar(self, value: Any, path: str) -> None:
        kind = class_of(value)
        if kind is float:
            self._update(b"f" if self.ignore_floats else struct.pack("<cd", b"f", value))
            self._spend(_OBJECT_BYTES)
            return
        self.is_plain = self.is_plain and kind in SCALARS
        if kind is bytes:
            text = value
        elif kind is str:
            text = value.encode("utf-8", "surrogatepass")
        elif self.ignore_floats and isinstance(value, np.floating):
            text = b""
        else:
            text = repr(value).encode()
        if isinstance(value, Enum):
            self.path_of(kind, path)  # its members may have attributes
        self._spend(_OBJECT_BYTES + len(text))
        self._update(_tag(kind) + struct.pack("<q", len(text)) + text)

    def _container(self, value: Any, path: str) -> None:
        kind: Any = type(value)
        self._spend(_OBJECT_BYTES)
        if not issubclass(kind, tuple) and self._is_met(value):
            return
        if self._depth == MAX_DEPTH:
            raise UncapturedError(TOO_DEEP)
        self._depth += 1
        factory = None if kind in NESTED else getattr(value, "default_factory", None)
        is_known = factory is None or factory_of(value) is None
        if kind not in NESTED:  # a deep copy may copy more than the elements
            has_more = getattr(value, "__dict__", None) or hasattr(kind, "__deepcopy__")
            self.is_plain = self.is_plain and is_known and not has_more
        self._update(struct.pack("<q", len(value)))
        if kind is deque:
            self._update(repr(value.maxlen).encode())
        if kind in SETS:
            texts = "".join(sorted(map(self._element, value)))
            self._update(texts.encode("utf-8", "surrogatepass"))
        elif kind in MAPPINGS:
            self._update((repr(factory) if is_known else sort_of(factory)).encode())
            for key, each in value.items():
                self._feed(key, path)
                self._item(each, path, key)
        elif not self._columns(value):
            for index, each in enumerate(value):
                self._item(each, path, index)
        self._depth -= 1

    def _item(self, value: Any, path: str, key: Any) -> None:
        if type(value) in _PLAIN:  # most of them: without a path, which takes longer than the rest
            self._scalar(value, path)
        else:
            self._feed(value, f"{path}[{key!r}]")

    def _columns(self, value: Any) -> bool:
        """A long sequence at once: of floats, of arrays, or of tuples of numbers and arrays."""
        if len(value) < _MIN_ROWS or self.ignore_floats:
            return False
        kinds = set(map(type, value))
        kind: Any = next(iter(kinds))
        if len(kinds) > 1:
            return False
        if kind is float:
            self._spend(_OBJECT_BYTES * len(value))
            self._update(b"floats")
            self._update(np.array(value, "<f8"))
            return True
        if kind is int and len(value) > MAX_OBJECTS:  # shorter ones have digests in checkpoints
            numbers = np.array(value)
            if numbers.dtype == np.int64:
                self._spend_memory(numbers.nbytes)
                self._update(b"integers")
                self._update(numbers)
                return True
        columns: list[list[Any]] = []
        if kind is np.ndarray:
            columns = [list(value)]
        elif (kind is tuple or is_namedtuple(kind)) and len(set(map(len, value))) == 1:
            columns = [list(each) for each in zip(*value, strict=True)]
        arrays = [_packed(each) for each in columns]
        if not columns or any(each is None for each in arrays):
            return False
        self._spend(_OBJECT_BYTES * len(value) * (1 + len(columns)))
        self._update(b"rows" + _tag(kind) + struct.pack("<q", len(columns)))
        for column, array in zip(columns, arrays, strict=True):
            self._column(column, array)
        return True

    def _column(self, column: list[Any], first: Any) -> None:
        self._update(_tag(class_of(column[0])) + f"{first.dtype.str}{first.shape}".encode())
        if type(column[0]) is not np.ndarray:
            self._update(first)
            return
        self.is_plain = False
        self.memory += column
        self._spend_memory(first.nbytes * len(column))
        met, kept = self._met, self._kept
        numbers = []
        for each in column:  # an alias has the number of its object, as in _is_met
            number = met.setdefault(id(each), len(met))
            if number == len(kept):
                kept.append(each)
            numbers.append(number)
            self._update(each)
        self._update(np.array(numbers, "<i8"))

    def _element(self, value: Any) -> str:
        """An element of a set, in a text that is the same in each process."""
        self._spend(_OBJECT_BYTES)
        if type(value) is tuple:
            return f"({', '.join(map(self._element, value))})"
        if kind_of(value) is not Kind.SCALAR:
            raise UncapturedError("a set of objects")
        return f"{type(value).__name__} {value!r}"

    def _tensor(self, value: Tensor, path: str) -> None:
        if value in self.foreign:
            self._update(str(self.foreign.name_of(value)).encode())
            return
        self.memory += [] if wraps_others(value) else [value]
        if gradient_of(value) is not None:
            self._update(b"grad")
            self._feed(value.grad, path)
        self._update(f"{value.dtype}{tuple(value.shape)}{value.device.type}".encode())
        for part in parts_of_tensor(value):
            self._elements(part)

    def _array(self, value: Any, path: str) -> None:
        self._update(f"{value.dtype.str}{value.shape}".encode())
        if value.dtype.hasobject:
            self._feed(value.tolist(), path)
        else:
            self.memory.append(value)
            self._elements(value)

    def _buffer(self, value: Any, path: str) -> None:
        self._without_memory(self._array, np.frombuffer(value, np.uint8), path)

    def _elements(self, value: Any) -> None:
        for piece in buffers_of(self._sampled(value)):
            self._update(piece)

    def _generator(self, value: Any, path: str) -> None:
        if self._has_generators:
            self._feed(generator_state(value), path)

    def _stateful(self, value: Any, path: str) -> None:
        if value in self.foreign:
            self._update(str(self.foreign.name_of(value)).encode())
        else:
            self.path_of(value, path)  # its state may lack some of its attributes
            self._without_memory(self._feed, value.state_dict(), path)

    def _reduced(self, value: Any, path: str) -> None:
        for each in reduced(value):
            self._without_memory(self._part, each, path)

    def _without_memory(self, feed: Callable[[Any, str], None], value: Any, path: str) -> None:
        """Feeds a part of what restores its own tensors and arrays."""
        memory, self.memory = self.memory, []
        feed(value, path)
        self.memory = memory

    def _part(self, value: Any, path: str) -> None:
        """Adds a part of what makes an object; the code in it is known by its name."""
        name = global_name(value)
        if name:
            self.makers[name] = value
            self._update(name.encode())
        elif type(value) is tuple:
            for each in value:
                self._part(each, path)
        else:
            self._feed(value, path)

    def _object(self, value: Any, path: str) -> None:
        """The path of an object, or the name of one that is saved elsewhere."""
        self._update(str(self.path_of(value, path) or self.foreign.name_of(value)).encode())

    def _code(self, value: Any, path: str) -> None:
        self.path_of(value, path)  # other objects may change which one it is
        self._update(sort_of(value).encode())

    def _call(self, value: Any, path: str) -> None:
        self._update(f"{sort_of(value)} {cache_size(value)}".encode())
        for each in parts_of_call(value):
            self._feed(each, path)

    def _iterator(self, value: Any, path: str) -> None:
        raise UncapturedError(f"a {type(value).__name__}, whose position nothing can read")

    def _sampled(self, value: Any) -> Any:
        """A tensor or an array; of one that is too large to be digested each time, some elements.

        It is too large to be saved as well: this decides whether a change of it is reported.
        """
        content = value
        if value.nbytes > _MAX_DIGESTED:
            rows = value.reshape(-1) if _is_dense(value) else value
            content = rows[:: max(1, len(rows) // _NUM_SAMPLES)][:_NUM_SAMPLES]
            self.num_skipped += value.nbytes - content.nbytes
        self._spend_memory(content.nbytes)
        return content

    def _is_met(self, value: Any) -> bool:
        """Whether a cycle or an alias leads to an object that was digested before."""
        number = self._met.setdefault(id(value), len(self._met))
        if number < len(self._kept):
            self._update(b"@" + struct.pack("<q", number))
            return True
        self._kept.append(value)  # its id stays its own
        return False

    def _spend(self, num_bytes: int) -> None:
        self.left -= num_bytes
        self.num_objects += 1
        if self.num_objects > MAX_OBJECTS:
            raise OverLimitError(TOO_MANY)
        if self.left < 0:
            raise OverLimitError

    def _spend_memory(self, num_bytes: int) -> None:
        self.left_memory -= num_bytes
        if self.left_memory < 0:
            raise OverLimitError

    # How each kind of value is added.
    _feeds: ClassVar[dict[Kind, Callable[[Content, Any, str], None]]] = {
        Kind.SCALAR: _scalar,
        Kind.CONTAINER: _container,
        Kind.TENSOR: _tensor,
        Kind.ARRAY: _array,
        Kind.BUFFER: _buffer,
        Kind.GENERATOR: _generator,
        Kind.STATEFUL: _stateful,
        Kind.REDUCED: _reduced,
        **dict.fromkeys((Kind.OBJECT, Kind.MODULE), _object),
        **dict.fromkeys((Kind.FUNCTION, Kind.CLASS), _code),
        Kind.CALL: _call,
        Kind.ITERATOR: _iterator,
        Kind.NAMED: lambda self, value, _: self._update(sort_of(value).encode()),
        Kind.LEAF: lambda self, *_: self._update(b"leaf"),
        Kind.CONSTANT: lambda self, value, _: self._update(repr(value).encode()),
        Kind.SHARED: lambda self, value, _: self._update(bytes(memory_of(value))),
        Kind.OPAQUE: lambda self, value, _: self._update(str(id(value)).encode()),
    }
    # Of these, a second path to one object says so. A container looks by itself: a tuple is none.
    _aliased: ClassVar[frozenset[Kind]] = frozenset(
        {Kind.OBJECT, Kind.MODULE, Kind.FUNCTION, Kind.CLASS, Kind.TENSOR, Kind.ARRAY, Kind.BUFFER}
        | {Kind.GENERATOR, Kind.STATEFUL, Kind.REDUCED}
    )


def has_paths(value: Any) -> bool:
    """Whether its digest depends on paths of objects, which differ between user states."""
    return any(kind_of(each) in _WITH_PATHS for each in parts_in(value))


def gradient_of(tensor: Tensor) -> Tensor | None:
    """What a tensor has summed up in ``.grad``; torch warns where another than a leaf is read."""
    return tensor.grad if tensor.is_leaf else None


def global_name(value: Any) -> str:
    """The full dotted name of a function or a class of a module; empty for any other object.

    Builtin functions, as ``getattr``, have none: what makes an object must do nothing else.
    """
    name = getattr(value, "__qualname__", None) if callable(value) else None
    module = getattr(value, "__module__", None)
    is_builtin = module in (None, "builtins") and not isinstance(value, type)
    return "" if is_builtin or not isinstance(name, str) else f"{module}.{name}"


def plain_digest(value: Any, *, ignore_floats: bool) -> Any:
    """What is equal for equal numbers, and for containers of a few plain values: their repr.

    Args:
        value: the value.
        ignore_floats: see ``walk``; then containers have no such digest.

    Returns:
        The digest; None for any other value.
    """
    kind = type(value)
    if kind in NESTED:
        is_plain = not ignore_floats and _is_short_and_plain(value, kind, set())
        return (kind.__name__, repr(value)) if is_plain else None
    if ignore_floats and kind is float:
        return "float"
    return (kind.__name__, repr(value)) if kind in _NUMBERS else None


def _is_short_and_plain(value: Any, kind: Any, met: set[int]) -> bool:
    """Whether it is a container of a few numbers, short texts and such containers.

    Args:
        value: the container.
        kind: its class.
        met: the ids of the containers in it, to which it is added; no two may be one.
    """
    if len(value) + len(met) > _MAX_REPR or id(value) in met:
        return False
    met.add(id(value))
    for each in (*value, *value.values()) if kind is dict else value:
        inner = type(each)
        if inner is str:
            is_short = len(each) <= _MAX_REPR
        else:
            is_short = inner in _NUMBERS or (
                inner in NESTED and _is_short_and_plain(each, inner, met)
            )
        if not is_short:
            return False
    return True


def _is_dense(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor)
    return bool(value.is_contiguous() if is_tensor else value.flags.c_contiguous)


def _packed(column: list[Any]) -> Any:
    """Numbers of one type as an array, of equally shaped arrays the first; None for all else."""
    kinds = set(map(type, column))
    if kinds in ({float}, {bool}):
        return np.array(column)
    if kinds == {int}:
        return np.array(column) if min(column) > -(2**62) and max(column) < 2**62 else None
    if kinds != {np.ndarray}:
        return None
    layouts = {(each.dtype, each.shape, each.flags.c_contiguous) for each in column}
    is_right = len(layouts) == 1 and column[0].flags.c_contiguous
    return column[0] if is_right and column[0].dtype.kind in "biufc" else None


@cache
def _tag(kind: type) -> bytes:
    return f"<{kind.__module__}.{kind.__qualname__}>".encode()


def size_of(value: Any) -> int:
    """The bytes of a value, about: of its tensors and arrays, and of what containers hold."""
    parts = {id(each): each for each in islice(parts_in(value), 10**6)}
    total = _OBJECT_BYTES * len(parts)
    for each in parts.values():
        if isinstance(each, Tensor):
            total += sum(part.nbytes for part in parts_of_tensor(each))
        elif isinstance(each, (np.ndarray, bytes, str)):
            total += getattr(each, "nbytes", len(each))
    return total
