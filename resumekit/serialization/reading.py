"""Reads states that one rank wrote whole, or several ranks in shards, as this rank needs them.

A state that one rank wrote is read as a sharded one with a single writer.

A caller that reads box by box needs no memory for whole tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from resumekit.errors import CorruptCheckpointError
from resumekit.serialization.data_files import DataFile, DataFiles, Fetch, plan_fetches, read_index
from resumekit.serialization.decoding import Decoder, references
from resumekit.serialization.deferral import (
    Deferral,
    LoadMemory,
    PendingState,
    live_targets,
)
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.index import Index, index_name, stem_of
from resumekit.serialization.leaves import (
    PLAIN_TYPES,
    ElementType,
    dense_strides,
    flat_bytes,
    retyped,
    stored_values,
)
from resumekit.serialization.sharding import (
    Box,
    Logical,
    box_of,
    local_part,
    part_name,
    sharded_like,
    sharding_of,
)
from resumekit.state import SharingPattern
from resumekit.storage.io.pipeline import use_huge_pages
from resumekit.storage.manifest import ComponentRecord, StepReader

# A tensor of the state on the meta device, and the live DTensor that defines the wanted shard.
Pairs = Iterable[tuple[Tensor, Any]]

# How states of several groups are merged, and which entries this rank needs: see ``Stateful``.
Merge = Callable[[list[Any]], Any]
PartOf = Callable[[Any], Any]


@dataclass(frozen=True)
class StoredSource:
    """The files of a component in a checkpoint.

    Args:
        step: the checkpoint.
        directory: of the component.
        key: of the component.
        indices: the file names of its indices, one for each process group; empty if rank
            ``writer`` wrote it whole.
        writer: that rank.
    """

    step: StepReader
    directory: str
    key: str
    indices: tuple[str, ...]
    writer: int = 0

    @classmethod
    def of_record(
        cls, step: StepReader, record: ComponentRecord, writer: int | None = None
    ) -> StoredSource:
        """The files of a component; where ranks wrote whole states, by default the first one's."""
        indices: tuple[str, ...] = ()
        if record.pattern == SharingPattern.SHARDED.value:
            firsts = [group[0] for group in record.groups] or [0]
            indices = tuple(index_name(first, len(firsts) > 1) for first in firsts)
        writer = record.writers[0] if writer is None else writer
        return cls(step, record.directory, record.key, indices, writer)

    def views(self) -> list[_View]:
        """What each group wrote; verified."""
        files = DataFiles(self.step, self.directory)
        if self.indices:
            indices = {
                name: read_index(self.step, f"{self.directory}/{name}", is_common=True)
                for name in self.indices
            }
        else:
            indices = {f"rank-{self.writer:05d}.json": files[self.writer].index}
        where = f"{self.step.name}/{self.directory}"
        return [
            _View(self.key, TensorReader(index, f"{where}/{name}", files))
            for name, index in indices.items()
        ]


def read_payload(
    step: StepReader,
    directory: str,
    rank: int,
    keys: Collection[str] | None = None,
    deferral: Deferral | None = None,
) -> dict[str, Any]:
    """The states that a rank wrote, every byte of them verified.

    Args:
        step: the checkpoint.
        directory: as given to ``Payload``.
        rank: the rank that wrote.
        keys: the component keys to read; all by default.
        deferral: which tensors a load copies into live ones; where it has no memory for them, they
            are verified, and stay on the meta device until ``Deferral.complete``.

    Raises:
        CorruptCheckpointError: damage or a missing key; names the file.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    where, files = f"{step.name}/{stem_of(directory, rank)}.json", DataFiles(step, directory)
    index = files[rank].index
    wanted = list(index.states) if keys is None else list(keys)
    for key in wanted:
        if key not in index.states:
            raise CorruptCheckpointError(where, found=f"has no state of {key!r}")
    tensors: dict[str, Tensor] = {}
    deferral = deferral or Deferral()
    if index.records:
        reader = TensorReader(index, where, files, check_headers=True)
        names = set(index.tensors)
        if keys is not None:
            names &= {name for name, _ in references([index.states[key] for key in wanted])}
        deferred = _deferred(index, wanted, deferral, where)
        memory: dict[str, Tensor] = {}
        if deferral.memory is None:  # they are verified only
            memory = {name: stored_values(tensor) for name, tensor in deferred.items()}
        tensors = reader.read(
            dict.fromkeys(names),
            memory=memory,
            load_memory=deferral.memory,
            in_load_memory=deferred,
        )
        if deferral.memory is None:
            tensors |= deferred
            for key in wanted:
                its = {name for name, _ in references(index.states[key])}
                if its & deferred.keys():
                    known = {name: tensors[name] for name in its}
                    pending = PendingState(where, index.states[key], known, reader.read_into)
                    deferral.add(key, pending)
    decoder = Decoder(tensors, where=where)
    return {key: decoder.decode(index.states[key]) for key in wanted}


def _deferred(
    index: Index, keys: Collection[str], deferral: Deferral, where: str
) -> dict[str, Tensor]:
    """The tensors that a load copies into live ones, on the meta device."""
    uses = {key: list(references(index.states[key])) for key in keys}
    num_users = Counter(name for found in uses.values() for name in {name for name, _ in found})
    strided = {record.name for record in index.records if record.strides is not None}
    deferred: dict[str, Tensor] = {}
    for key in deferral.live.keys() & uses.keys():
        names = {name for name, _ in uses[key]}
        if any(is_whole for _, is_whole in uses[key]) or names - index.tensors.keys():
            continue  # values in the tree, or damage
        saved = {name: _without_values(index.tensors[name]) for name in sorted(names)}
        state = Decoder(saved, where=where).decode(index.states[key])
        pairs = deferral.live[key](state)
        for name in live_targets(saved, pairs, in_place=deferral.memory is None):
            if num_users[name] == 1 and name not in strided:
                deferred[name] = saved[name]
    return deferred


def read_sharded(
    source: StoredSource,
    pair: Callable[[Any], Pairs],
    check: Callable[[Any], None] = lambda state: None,
    *,
    merge: Merge = lambda states: states[0],
    part_of: PartOf | None = None,
) -> tuple[Any, frozenset[str]]:
    """The verified state of one component, with this rank's shard of its sharded tensors.

    Only the blocks that hold wanted bytes are read, into host memory.

    Args:
        source: its files.
        pair: takes the state with all tensors on the meta device; returns the live DTensor whose
            placements each gets. A tensor without one is read whole.
        check: takes the same and may refuse it before tensors are read.
        merge: makes one state of those of all groups.
        part_of: selects what this rank needs; by default all.

    Returns:
        The state, and the names of the tensors that this rank does not need.

    Raises:
        CorruptCheckpointError: damage; names the file.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    views = source.views()

    def merged(states: list[Any]) -> Any:
        state = merge(states)
        return state if part_of is None else part_of(state)

    skeleton = merged([view.state() for view in views])
    check(skeleton)
    partners = {id(saved): live for saved, live in pair(skeleton)}
    needed = None if part_of is None else {id(leaf) for _, leaf in leaves_of(skeleton)}
    for view in views:
        view.read(partners, needed)
    state = merged([view.state() for view in views])
    if len(views) > 1:
        check(state)  # values matter too, such as a learning rate that is a tensor
    taken = {name for view in views for name in view.taken(needed)}
    return state, frozenset({name for view in views for name in view.meta_tensors} - taken)


class _View:
    """What one group wrote of a component, by its index.

    Attributes:
        reader: of its tensors.
        meta_tensors: the tensors of the state on the meta device, by name.
    """

    def __init__(self, key: str, reader: TensorReader) -> None:
        self.reader = reader
        if key not in reader.index.states:
            raise CorruptCheckpointError(reader.where, found=f"has no state of {key!r}")
        self._tree = reader.index.states[key]
        whole = {name for name, is_whole in references(self._tree) if is_whole}
        self._values = reader.read(dict.fromkeys(whole))
        self.meta_tensors = {
            name: _without_values(logical)
            for name, logical in reader.index.tensors.items()
            if name not in whole
        }

    def read(self, partners: Mapping[int, Any], needed: set[int] | None) -> None:
        """Reads the tensors on the meta device.

        Args:
            partners: the live DTensor whose placements a tensor gets, by id.
            needed: the ids of the needed ones; None for all.
        """
        named = {name for name, is_whole in references(self._tree) if not is_whole}
        wanted = {
            name: partners.get(id(self.meta_tensors[name])) for name in self.taken(needed) & named
        }
        self._values |= self.reader.read(wanted)

    def taken(self, needed: set[int] | None) -> set[str]:
        """The names of the tensors that are needed."""
        if needed is None:
            return set(self.meta_tensors)
        return {name for name, tensor in self.meta_tensors.items() if id(tensor) in needed}

    def state(self) -> Any:
        """The state; tensors that have not been read are on the meta device."""
        tensors = {**self.meta_tensors, **self._values}
        return Decoder(tensors, where=self.reader.where).decode(self._tree)


@dataclass(frozen=True, eq=False)
class TensorReader:
    """Reads tensors by an index that describes them.

    Args:
        index: of the tensors.
        where: what error messages call the index.
        files: the data file of each writer.
        check_headers: whether to read and compare the header of each of these files too.
    """

    index: Index
    where: str
    files: DataFiles
    check_headers: bool = False

    def read(
        self,
        partners: Mapping[str, Any],
        *,
        memory: Mapping[str, Tensor] = MappingProxyType({}),
        load_memory: LoadMemory | None = None,
        in_load_memory: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Tensors by name: this rank's shard of those with a partner, the others whole.

        Args:
            partners: for each wanted name the live DTensor, or None.
            memory: of whole tensors, as plain numbers; on the meta device to verify them only. They
                are not returned.
            load_memory: for those of ``in_load_memory``, as long as there is some left.
            in_load_memory: names of whole tensors.
        """
        tensors, boxes = self.index.tensors, self._boxes(partners)
        divided = self._divided(boxes)
        targets = dict(memory)
        if load_memory is not None:
            for file, fetches in divided:
                targets |= file.memory_of(fetches, in_load_memory, tensors, load_memory)
        for name, box in boxes.items():
            if name not in targets:
                targets[name] = _memory(tensors[name], box)
        self._fill(divided, targets)
        strides = {
            fetch.name: file.strides(fetch.name)
            for file, fetches in divided
            for fetch in fetches
            if fetch.chunk.box.sizes == tensors[fetch.name].shape
        }
        return {
            name: _value(tensors[name], targets[name], strides.get(name), partner)
            for name, partner in partners.items()
            if name not in memory
        }

    def read_into(self, memory: Mapping[str, Tensor]) -> None:
        """Reads whole tensors into memory of plain numbers, by name."""
        self.read(dict.fromkeys(memory), memory=memory)

    def read_boxes(self, boxes: Mapping[str, Box], memory: Mapping[str, Tensor]) -> None:
        """Reads a box of each tensor into memory of plain numbers, by name."""
        self._fill(self._divided(boxes), memory)

    def _boxes(self, partners: Mapping[str, Any]) -> dict[str, Box]:
        """The part that this rank needs of each tensor; an empty box where it needs none."""
        known: dict[object, Box] = {}  # torch takes long for a box, and most are sharded alike
        boxes: dict[str, Box] = {}
        for name, partner in partners.items():
            logical = self.index.tensors.get(name)
            if logical is None:
                raise CorruptCheckpointError(self.where, found=f"has no tensor {name[:200]!r}")
            if partner is None:
                boxes[name] = Box.whole(logical.shape)
                continue
            kind = (partner.shape, local_part(partner).shape, sharding_of(partner))
            if kind not in known:
                empty = (0,) * len(logical.shape)
                known[kind] = box_of(partner, name) or Box(empty, empty)
            boxes[name] = known[kind]
        return boxes

    def _divided(self, boxes: Mapping[str, Box]) -> list[tuple[DataFile, list[Fetch]]]:
        """The fetches from each file that together give all elements of the boxes."""
        fetches: dict[int, list[Fetch]] = (
            {writer: [] for writer in self.files} if self.check_headers else {}
        )
        missing = {name: box.num_elements for name, box in boxes.items()}
        for fetch in plan_fetches(self.index.tensors, boxes):
            fetches.setdefault(fetch.chunk.writer, []).append(fetch)
            missing[fetch.name] -= fetch.wanted.num_elements
        for name, num_elements in missing.items():
            if num_elements:
                raise CorruptCheckpointError(
                    f"{self.where}: {name}",
                    found=f"parts without {num_elements} of the elements {boxes[name]}",
                    expected="parts that tile the tensor",
                )
        divided = [
            (file, its_fetches)
            for writer in sorted(fetches)
            for file, its_fetches in self.files[writer].divide(fetches[writer])
            if its_fetches or (self.check_headers and file.index.records)
        ]
        # Before memory is allocated: the index may promise more than the files hold.
        for file, its_fetches in divided:
            file.require(its_fetches, self.index.tensors)
        return divided

    def _fill(
        self, divided: list[tuple[DataFile, list[Fetch]]], targets: Mapping[str, Tensor]
    ) -> None:
        for file, fetches in divided:
            parts = chain.from_iterable(file.parts(each, targets[each.name]) for each in fetches)
            file.read(list(parts), check_header=self.check_headers)


def _value(
    logical: Logical, memory: Tensor, strides: tuple[int, ...] | None, partner: Any
) -> Tensor:
    """The memory as the tensor that it holds, or as this rank's part of it."""
    dtype, shape = logical.element.dtype, tuple(memory.shape)
    if partner is not None:
        local = retyped(memory, dtype, 0, shape, memory.stride())  # of its own
        part: Tensor = sharded_like(partner, local)
        return part
    if strides is not None:  # stored row by row, needed in another order
        ordered = torch.empty_strided(shape, strides, dtype=memory.dtype, device="cpu")
        memory = ordered.copy_(memory)
    return retyped(memory, dtype, int(memory.storage_offset()), shape, memory.stride())


def _memory(logical: Logical, box: Box) -> Tensor:
    """Memory of its own for the part wanted of a tensor, as plain numbers."""
    dtype = PLAIN_TYPES[logical.element.num_bytes]
    memory = torch.empty(box.sizes, dtype=dtype, device="cpu")
    use_huge_pages(flat_bytes(memory))
    return memory


def _without_values(logical: Logical) -> Tensor:
    strides, dtype = dense_strides(logical.shape), logical.element.dtype
    return torch.empty_strided(logical.shape, strides, dtype=dtype, device="meta")


# ---------------------------------------------------------------- box by box


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A whole tensor of a checkpoint, whichever ranks wrote its parts.

    Args:
        name: in its index.
        meta: what stands for it in the state.
        reader: of the tensors of its index.
    """

    name: str
    meta: Tensor
    reader: TensorReader

    @property
    def logical(self) -> Logical:
        """Its type, shape and parts."""
        return self.reader.index.tensors[self.name]

    @property
    def element(self) -> ElementType:
        """The type of its elements."""
        return self.logical.element

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        return self.logical.shape

    @property
    def num_bytes(self) -> int:
        """The length of all its parts."""
        return math.prod(self.shape) * self.element.num_bytes

    def has_digests_of(self, other: StoredTensor) -> bool:
        """Whether the digests of the blocks that hold it prove that both have the same bytes.

        Nothing is read for it but the indices. False says nothing: the layouts may differ.

        Raises:
            CheckpointError: damage, or an I/O error.
        """
        mine, theirs = self.logical.chunks, other.logical.chunks
        if len(mine) != len(theirs) or self.shape != other.shape or self.element != other.element:
            return False
        return all(
            first == second for first, second in zip(self._digests(), other._digests(), strict=True)
        )

    def _digests(self) -> Iterator[tuple[Any, ...]]:
        for chunk in self.logical.chunks:
            files = self.reader.files[chunk.writer]
            yield chunk.box, *files.block_digests(part_name(self.name, chunk.number))


@dataclass(frozen=True)
class StoredState:
    """A state of a checkpoint whose tensors have not been read.

    Args:
        state: with its tensors on the meta device. Of those that share memory with another one,
            the values are there.
        tensors: the stored tensor of each, by the id of the one on the meta device.
    """

    state: Any
    tensors: Mapping[int, StoredTensor]


def open_state(source: StoredSource, merge: Merge) -> StoredState:
    """The state of a component as all its writers stored it; tensors are not read.

    Args:
        source: its files.
        merge: makes one state of those of all groups.

    Raises:
        CheckpointError: damage of an index, or an I/O error.
    """
    views = source.views()
    tensors = {
        id(meta): StoredTensor(name, meta, view.reader)
        for view in views
        for name, meta in view.meta_tensors.items()
    }
    return StoredState(merge([view.state() for view in views]), tensors)


def read_boxes(wanted: Sequence[tuple[StoredTensor, Box]]) -> list[Tensor]:
    """Boxes of tensors as plain numbers, verified; a file's blocks are read once for all of them.

    Args:
        wanted: one box of each tensor.

    Raises:
        CheckpointError: damage, or an I/O error.
    """
    memories = [_memory(tensor.logical, box) for tensor, box in wanted]
    by_reader: dict[int, list[int]] = {}
    for number, (tensor, _) in enumerate(wanted):
        by_reader.setdefault(id(tensor.reader), []).append(number)
    for numbers in by_reader.values():
        named = {wanted[number][0].name: number for number in numbers}
        boxes = {name: wanted[number][1] for name, number in named.items()}
        targets = {name: memories[number] for name, number in named.items()}
        wanted[numbers[0]][0].reader.read_boxes(boxes, targets)
    return memories
