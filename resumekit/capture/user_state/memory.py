"""What several slots hold: memory of tensors and arrays, and containers, after a resume too.

Two share memory where the bytes overlap that their elements lie in. All those that overlap, one
after the other, make up a ``Cluster``. A checkpoint has a layout for each: the path of its largest
member, how many bytes that begins after the first byte of the layout, and for each saved member the
index of its elements, its first byte and its strides, in bytes.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from resumekit.capture.nested_state import describe
from resumekit.errors import InvalidStateError, StateMismatchError
from resumekit.serialization.leaves import retyped
from resumekit.serialization.sharding import fill
from resumekit.serialization.tensors import overlapping

_ALIGNMENT = 16  # of the largest element
_device_of = attrgetter("device")
_MAX_BYTES = 64  # of a layout, per byte of the elements in it: the rest of it is never read

_CONTAINERS = frozenset(
    {list, dict, set, deque, defaultdict, OrderedDict, Counter, bytearray, array}
)

Layout = tuple[str, int, list[tuple[int, int, list[int]]]]


class Sharer(NamedTuple):
    """A tensor or an array in a slot, and where its elements lie.

    Args:
        path: of the slot.
        value: the tensor or the array.
        device: where they lie.
        begin: the address of the first byte.
        end: the address of the byte after the last one.
    """

    path: str
    value: Any
    device: str
    begin: int
    end: int


class Cluster:
    """Tensors and arrays that share memory.

    Args:
        sharers: in the order in which they were found; one object may be in several slots.
    """

    def __init__(self, sharers: Sequence[Sharer]) -> None:
        self.sharers = sharers
        self.root = max(sharers, key=lambda each: each.end - each.begin)  # the first of the largest

    @property
    def paths(self) -> set[str]:
        """Of the slots."""
        return {each.path for each in self.sharers}

    @property
    def is_one(self) -> bool:
        """Whether it is one object, perhaps in several slots."""
        return len({id(each.value) for each in self.sharers}) == 1

    @cached_property
    def begin(self) -> int:
        """The address of the first byte."""
        return min(each.begin for each in self.sharers)

    @cached_property
    def end(self) -> int:
        """The address of the byte after the last one."""
        return max(each.end for each in self.sharers)

    def can_hold(self, value: Any) -> bool:
        """Whether a resume can make one of them in such memory."""
        is_lazy = isinstance(value, Tensor) and (value.is_conj() or value.is_neg())
        num_bytes = sum({id(s.value): s.value.nbytes for s in self.sharers}.values())
        return not is_lazy and self.end - self.begin <= _MAX_BYTES * num_bytes

    def has_root_in(self, values: Mapping[str, Any]) -> bool:
        """Whether the value at the path of the root is the root, in which all others lie."""
        path, root, _, *ends = self.root
        is_whole = ends == [self.begin, self.end] and _bytes_of(root) is not None
        return is_whole and values[path].value is root

    def views(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The path of each one but the root, and where in the root it lies."""
        path, root, _, begin, _ = self.root
        for each in self.sharers:
            if each.value is not root or each.path != path:
                where = (path, _address_of(each.value) - begin, *strides_of(each.value))
                yield each.path, where


class Clusters:
    """All memory of some slots that is shared, or in which elements do not follow each other.

    Args:
        values: path and value of each tensor and array in them.
    """

    def __init__(self, values: Sequence[tuple[str, Any]]) -> None:
        self.all = [Cluster(each) for each in _overlapping(_sharers(values))]
        # Of those in memory with others; one object in several slots is none.
        self.by_id: dict[int, Cluster] = {}
        # The paths of the slots of one object in several.
        self.paths_of_one: dict[int, set[str]] = {}
        for cluster in self.all:
            if cluster.is_one:
                self.paths_of_one[id(cluster.root.value)] = cluster.paths
            else:
                self.by_id.update((id(each.value), cluster) for each in cluster.sharers)

    def views(self) -> dict[str, tuple[Any, ...]]:
        """Of each slot that has them, where in other tensors and arrays its own lie."""
        found: dict[str, list[Any]] = defaultdict(list)
        for cluster in self.all:
            for path, where in cluster.views():
                found[path].append(where)
        return {path: tuple(sorted(each)) for path, each in found.items()}

    def with_sharers(
        self, paths: Iterable[str], seen: Mapping[str, Any], known: Container[str]
    ) -> list[str]:
        """Some slots to be saved, and those that have to be saved with them.

        A view whose root is not changed is saved alone: it is made in the root of the next launch.

        Args:
            paths: of the slots.
            seen: all slots.
            known: the paths of the owners whose slots are saved one by one.
        """
        chosen, num_before = dict.fromkeys(paths), -1
        while self.all and len(chosen) > num_before:
            num_before = len(chosen)
            for each in self.all:
                is_saved = each.root.path in chosen or not each.has_root_in(seen)
                if is_saved and not chosen.keys().isdisjoint(each.paths):
                    slots = (each for each in sorted(each.paths) if seen[each].owner in known)
                    chosen.update(dict.fromkeys(slots))
        return [*chosen]

    def layouts(
        self, indices: Mapping[int, int], seen: Mapping[str, Any], paths: Container[str]
    ) -> list[Layout]:
        """What a checkpoint has of them.

        Args:
            indices: under which their elements are saved, by the id of the value.
            seen: all slots.
            paths: of those that are saved.
        """
        found: list[Layout] = []
        for each in self.all:
            root, is_there = each.root, each.has_root_in(seen)
            saved = {
                i: s.value for s in each.sharers if (i := indices.get(id(s.value))) is not None
            }
            if each.is_one:
                is_there = False
                is_needed = each.can_hold(root.value) and not _is_contiguous(root.value)
            else:
                is_needed = len(saved) > 1 or (is_there and root.path not in paths)
            if saved and is_needed:
                begin = each.begin // _ALIGNMENT * _ALIGNMENT
                members = [
                    (index, _address_of(value) - begin, strides_of(value))
                    for index, value in saved.items()
                ]
                path = root.path if is_there else ""
                found.append((path, root.begin - begin if is_there else 0, members))
        return found


class SharedMemory:
    """The memory that the values of a checkpoint share, in live values or new.

    Args:
        where: what errors call the state.
        layouts: from the checkpoint, checked.
        data: the elements.
        live: the live slots, by path.
        clusters: of these.
        filled: what a checkpoint has for those that are restored, by path.
    """

    def __init__(
        self,
        where: str,
        layouts: Iterable[Layout],
        data: Sequence[Any],
        live: Mapping[str, Any],
        clusters: Clusters,
        filled: Mapping[str, Any],
    ) -> None:
        self._where, self._data = where, data
        self._live, self._clusters, self._filled = live, clusters, filled
        self._by_index = {
            index: (layout, offset, strides)
            for layout in layouts
            for index, offset, strides in layout[2]
        }
        self._made: dict[int, tuple[Any, int]] = {}  # by the id of the layout: bytes, and offset
        self._claimed: set[int] = set()  # the ids of clusters in which a layout lies

    def is_alone(self, live: Any) -> bool:
        """Whether a write into a live value changes no other live value.

        One in several slots may be elsewhere too, e.g. as the value that a metric begins with
        again: it is filled where it was in all of them when the checkpoint was written.
        """
        paths = self._clusters.paths_of_one.get(id(live), set())
        saved = {repr(self._filled.get(each)) for each in paths}
        return id(live) not in self._clusters.by_id and len(saved) < 2

    def locate(self, index: int, live: Any, device: Any) -> Any:
        """The memory of a saved value: a tensor or an array of its kind; None if it shares none.

        Args:
            index: of its elements.
            live: the value that is there.
            device: of new memory.

        Raises:
            StateMismatchError: the live value that it is a part of is smaller.
        """
        if index not in self._by_index:
            return None
        layout, offset, strides = self._by_index[index]
        is_like = isinstance(live, (Tensor, np.ndarray)) and strides_of(live) == strides
        if len(layout[2]) == 1 and not layout[0] and is_like:
            return None  # it shares none, and its elements lie as they did
        if id(layout) not in self._made:
            self._made[id(layout)] = self._memory(layout, device)
        memory, begin = self._made[id(layout)]
        path, saved = layout[0], self._data[index]
        made = _view(memory, saved, offset - begin, strides)
        if made is None:
            raise self._mismatch(path, f"{describe(saved)} at byte {offset - begin}")
        there = self._live[path].value if path in self._live else None
        return there if is_same_memory(there, made) else made

    def _memory(self, layout: Layout, device: Any) -> tuple[Any, int]:
        """The bytes of a layout, and which of it is the first."""
        path, at, members = layout
        present = self._live.get(path)
        live = present.value if present is not None and present.is_known else None
        if live is not None and (path not in self._filled or self._is_free(live)):
            found = _bytes_of(live)
            ends = (_extent(self._data[i], o, s)[1] for i, o, s in members)
            if found is not None and (path not in self._filled or max(ends) - at <= len(found)):
                cluster = self._clusters.by_id.get(id(live))
                self._claimed.add(id(cluster or live))
                return found, at
        size = max(_extent(self._data[i], o, s)[1] for i, o, s in members)
        if size > _ALIGNMENT + _MAX_BYTES * sum(self._data[each[0]].nbytes for each in members):
            raise self._mismatch(path, f"{size} bytes of shared memory")
        return torch.zeros(size, dtype=torch.uint8, device=device), 0

    def _is_free(self, live: Any) -> bool:
        """Whether all that share its memory are restored, and no other layout is there."""
        cluster = self._clusters.by_id.get(id(live))
        paths = cluster.paths if cluster else set[str]()
        return paths <= {*self._filled} and id(cluster or live) not in self._claimed

    def _mismatch(self, path: str, found: str) -> StateMismatchError:
        return StateMismatchError(
            f"{self._where}: {path}",
            found=f"{found} in it",
            expected="a tensor or an array of the size that it had when the checkpoint was written",
        )


def aliases(
    indices: Mapping[int, int],
    seen: Mapping[str, Any],
    known: Container[str],
    saved: Container[str],
) -> dict[str, list[int]]:
    """The slots with a list, a dict or the like that another slot is saved with, by path.

    They are to be saved too, and first, so that a resume fills the live one for both.

    Args:
        indices: of what is saved, by the id of the value.
        seen: all slots.
        known: the paths of the owners whose slots are saved one by one.
        saved: the paths of those that are saved.
    """
    return {
        path: [indices[id(each.value)]]
        for path, each in seen.items()
        if id(each.value) in indices and type(each.value) in _CONTAINERS
        if each.is_known and each.owner in known and path not in saved
    }


def check_layouts(where: str, layouts: Any, data: Sequence[Any]) -> None:
    """Raises InvalidStateError unless these are layouts of some data."""
    for each in layouts if isinstance(layouts, list) else [layouts]:
        is_right = isinstance(each, (list, tuple)) and [*map(type, each)] == [str, int, list]
        if not is_right or not all(_is_member(member, data) for member in each[2]):
            raise InvalidStateError(
                where, found=f"damaged: {each!r:.60}", expected="a layout of shared memory"
            )


def _is_member(given: Any, data: Sequence[Any]) -> bool:
    if not isinstance(given, (list, tuple)) or [*map(type, given)] != [int, int, list]:
        return False
    index, offset, strides = given
    value = data[index] if 0 <= index < len(data) else None
    if not isinstance(value, (Tensor, np.ndarray)) or {*map(type, strides)} - {int}:
        return False
    return len(strides) == value.ndim and _extent(value, offset, strides)[0] >= 0


def strides_of(value: Any) -> list[int]:
    """The strides of a tensor or an array, in bytes."""
    size = value.element_size() if isinstance(value, Tensor) else 1
    strides = value.stride() if isinstance(value, Tensor) else value.strides
    return [size * each for each in strides]


def is_same_memory(one: Any, other: Any) -> bool:
    """Whether two are tensors or arrays of the same elements."""
    if not isinstance(one, Tensor if isinstance(other, Tensor) else np.ndarray):
        return False
    return bool(
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and _address_of(one) == _address_of(other)
        and strides_of(one) == strides_of(other)
    )


def _address_of(value: Any) -> int:
    """Of the first element."""
    if isinstance(value, Tensor):
        offset = value.storage_offset() * value.element_size()
        return int(value.untyped_storage().data_ptr() + offset)
    return int(value.__array_interface__["data"][0])


def _extent(value: Any, offset: int, strides: Sequence[int]) -> tuple[int, int]:
    """The first byte of its elements and the one after the last, where these strides are its."""
    steps = [(n - 1) * step for n, step in zip(value.shape, strides, strict=True)]
    size = value.element_size() if isinstance(value, Tensor) else value.itemsize
    return offset + sum(s for s in steps if s < 0), offset + sum(s for s in steps if s > 0) + size


def _sharers(values: Sequence[tuple[str, Any]]) -> list[Sharer]:
    """Those that may share memory; most tensors and arrays have theirs for themselves."""
    owners = [_owner_of(each) for _, each in values]
    uses = Counter(owners)
    is_lent = any(each is None for each in owners)
    found = []
    for (path, each), owner in zip(values, owners, strict=True):
        may_share = is_lent or uses[owner] > 1 or not _is_contiguous(each)
        if may_share and _has_memory(each):
            device = str(each.device) if isinstance(each, Tensor) else "cpu"
            extent = _extent(each, _address_of(each), strides_of(each))
            found.append(Sharer(path, each, device, *extent))
    return found


def _owner_of(value: Any) -> Any:
    """What is equal for two tensors of one storage, and for two arrays of one object's memory.

    None of a tensor whose memory is not torch's own, but an array's.
    """
    while getattr(value, "base", None) is not None:
        value = value.base
    if not isinstance(value, Tensor):
        return (id(value),)
    if value.layout is not torch.strided:
        return 0
    storage = value.untyped_storage()
    return storage.data_ptr() if storage.resizable() or not value.is_cpu else None


def _is_contiguous(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout is not torch.strided or value.is_contiguous()
    return bool(value.flags.c_contiguous)


def _has_memory(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return bool(value.size)
    is_plain = value.layout is torch.strided and not value.is_nested
    return is_plain and value.numel() > 0 and value.untyped_storage().data_ptr() > 0


def _overlapping(sharers: Sequence[Sharer]) -> Iterator[list[Sharer]]:
    """Those that overlap, together and in the given order."""
    for _, group in groupby(sorted(sharers, key=_device_of), key=_device_of):
        for together in overlapping([*group]):
            if len(together) > 1 or not _is_contiguous(together[0].value):
                yield together


def _bytes_of(value: Any) -> Any:
    """The memory from its first element on, as bytes; None where that is not one piece."""
    if isinstance(value, Tensor) and _has_memory(value):
        offset = int(value.storage_offset()) * value.element_size()
        size = _extent(value, 0, strides_of(value))[1:]
        return retyped(value, torch.uint8, offset, size, (1,))
    if isinstance(value, np.ndarray) and value.flags.c_contiguous and not value.dtype.hasobject:
        return value.reshape(-1).view(np.uint8)
    return None


def fill_memory(live: Any, saved: Any) -> None:
    """Copies elements; those of an expanded tensor, which lie at one address, once."""
    if 0 in strides_of(live):
        once = tuple(slice(None, None if step else 1) for step in strides_of(live))
        live, saved = live[once], saved[once]
    if isinstance(live, Tensor):
        fill(live, saved)
    elif live.flags.writeable:
        np.copyto(live, saved)


def _view(memory: Any, like: Any, offset: int, strides: Sequence[int]) -> Any:
    """A tensor or an array of a kind in some bytes; None where it would be beyond them."""
    first, end = _extent(like, offset, strides)
    if first < 0 or end > len(memory):
        return None
    if isinstance(like, np.ndarray):
        buffer = memory.numpy() if isinstance(memory, Tensor) else memory
        return np.ndarray(like.shape, like.dtype, buffer, offset, strides)
    memory = memory if isinstance(memory, Tensor) else torch.from_numpy(memory)
    size, offset = like.element_size(), memory.storage_offset() + offset
    if any(each % size or each < 0 for each in (offset, *strides)):
        return None
    steps = tuple(each // size for each in strides)
    return retyped(memory, like.dtype, offset // size, like.shape, steps)
