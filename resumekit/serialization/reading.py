"""Reads states that one rank wrote whole, or several ranks in shards, as this rank needs them.

A state that one rank wrote is read as a sharded one with a single writer.

A caller that reads box by box needs no memory for whole tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from resumekit.errors import CorruptCheckpointError
from resumekit.serialization.data_files import ByteRange, DataFiles, read_index
from resumekit.serialization.decoding import Decoder, references
from resumekit.serialization.deferral import (
    Deferral,
    LoadMemory,
    PendingState,
    live_targets,
    plain_meta,
)
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.encoding import sharding_of
from resumekit.serialization.index import Index, ShardedIndex, stem_of
from resumekit.serialization.layouts import Fetch, Logical, part_name, plan_fetches
from resumekit.serialization.leaves import (
    PLAIN_TYPES,
    ElementType,
    dense_strides,
    flat_bytes,
    retyped,
)
from resumekit.serialization.sharding import Box, box_of, local_part, sharded_like
from resumekit.storage import StepReader, use_huge_pages

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

    def views(self) -> list[_View]:
        """What each group wrote; verified."""
        files = DataFiles(self.step, self.directory)
        if self.indices:
            indices = {
                name: read_index(ShardedIndex, self.step, f"{self.directory}/{name}")
                for name in self.indices
            }
        else:
            plain = files[self.writer].index
            whole = ShardedIndex.of_one_writer(plain, self.writer)
            indices = {f"rank-{self.writer:05d}.json": whole}
        return [_View(self, name, index, files) for name, index in indices.items()]


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
    plain = files[rank].index
    wanted = list(plain.states) if keys is None else list(keys)
    for key in wanted:
        if key not in plain.states:
            raise CorruptCheckpointError(where, found=f"has no state of {key!r}")
    tensors: dict[str, Tensor] = {}
    deferral = deferral or Deferral()
    if plain.records:
        index = ShardedIndex.of_one_writer(plain, rank)
        names = set(index.tensors)
        if keys is not None:
            names &= {name for name, _ in references([plain.states[key] for key in wanted])}
        deferred = _deferred(plain, index, wanted, deferral, where)
        memory = dict(plain_meta(index.tensors, deferred)) if deferral.memory is None else {}
        read = partial(_read, index, where=where, files=files, check_headers=True)
        tensors = read(
            dict.fromkeys(names),
            memory=memory,
            load_memory=deferral.memory,
            in_load_memory=deferred,
        )
        if deferral.memory is None:
            tensors |= deferred
            reread = partial(_reread, read)
            for key in wanted:
                its = {name for name, _ in references(plain.states[key])}
                if its & deferred.keys():
                    known = {name: tensors[name] for name in its}
                    deferral.add(key, PendingState(where, plain.states[key], known, reread))
    decoder = Decoder(tensors, where=where)
    return {key: decoder.decode(plain.states[key]) for key in wanted}


def _reread(read: Callable[..., Any], memory: Mapping[str, Tensor]) -> None:
    read(dict.fromkeys(memory), memory=memory)


def _deferred(
    plain: Index, index: ShardedIndex, keys: Collection[str], deferral: Deferral, where: str
) -> dict[str, Tensor]:
    """The tensors that a load copies into live ones, on the meta device."""
    uses = {key: list(references(plain.states[key])) for key in keys}
    num_users = Counter(name for found in uses.values() for name in {name for name, _ in found})
    strided = {record.name for record in plain.records if record.strides is not None}
    deferred: dict[str, Tensor] = {}
    for key in deferral.live.keys() & uses.keys():
        names = {name for name, _ in uses[key]}
        if any(is_whole for _, is_whole in uses[key]) or names - index.tensors.keys():
            continue  # values in the tree, or damage
        saved = {name: _without_values(index.tensors[name]) for name in sorted(names)}
        state = Decoder(saved, where=where).decode(plain.states[key])
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
        files: the data files.
        index: of the group.
        meta_tensors: the tensors of the state on the meta device, by name.
    """

    def __init__(
        self, source: StoredSource, name: str, index: ShardedIndex, files: DataFiles
    ) -> None:
        self.where = f"{source.step.name}/{source.directory}/{name}"
        self.files = files
        self.index = index
        if source.key not in index.states:
            raise CorruptCheckpointError(self.where, found=f"has no state of {source.key!r}")
        self._tree = index.states[source.key]
        whole = {name for name, is_whole in references(self._tree) if is_whole}
        self._values = _read(index, dict.fromkeys(whole), self.where, files)
        self.meta_tensors = {
            name: _without_values(logical)
            for name, logical in index.tensors.items()
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
        self._values |= _read(self.index, wanted, self.where, self.files)

    def taken(self, needed: set[int] | None) -> set[str]:
        """The names of the tensors that are needed."""
        if needed is None:
            return set(self.meta_tensors)
        return {name for name, tensor in self.meta_tensors.items() if id(tensor) in needed}

    def state(self) -> Any:
        """The state; tensors that have not been read are on the meta device."""
        tensors = {**self.meta_tensors, **self._values}
        return Decoder(tensors, where=self.where).decode(self._tree)


def _read(
    index: ShardedIndex,
    partners: Mapping[str, Any],
    where: str,
    files: DataFiles,
    *,
    check_headers: bool = False,
    memory: Mapping[str, Tensor] = MappingProxyType({}),
    load_memory: LoadMemory | None = None,
    in_load_memory: Collection[str] = (),
) -> dict[str, Tensor]:
    """Tensors by name: this rank's shard of those with a partner, the others whole.

    Args:
        index: of the tensors.
        partners: for each wanted name the live DTensor, or None.
        where: what error messages call the index.
        files: the data file of each writer.
        check_headers: whether to read and compare the header of each of these files too.
        memory: of whole tensors, as plain numbers; on the meta device to verify them only. They
            are not returned.
        load_memory: for those of ``in_load_memory``, as long as there is some left.
        in_load_memory: names of whole tensors.
    """
    wanted = _wanted(where, index, partners)
    fetches: dict[int, list[Fetch]] = {writer: [] for writer in files} if check_headers else {}
    for fetch in _fetches(where, index, wanted):
        fetches.setdefault(fetch.chunk.writer, []).append(fetch)
    divided = [
        (file, its_fetches)
        for writer in sorted(fetches)
        for file, its_fetches in files[writer].divide(fetches[writer])
        if its_fetches or (check_headers and file.index.records)
    ]
    # Before memory is allocated: the index may promise more than the files hold.
    for file, its_fetches in divided:
        file.require(its_fetches, index.tensors)
    targets = dict(memory)
    if load_memory is not None:
        for file, its_fetches in divided:
            targets |= file.memory_of(its_fetches, in_load_memory, index.tensors, load_memory)
    for name, box in wanted.items():
        if name not in targets:
            targets[name] = _memory(index.tensors[name], box)
    strides: dict[str, tuple[int, ...] | None] = {}
    for file, its_fetches in divided:
        parts: list[ByteRange] = []
        for fetch in its_fetches:
            parts += file.parts(fetch, targets[fetch.name])
            if fetch.chunk.box.sizes == index.tensors[fetch.name].shape:
                strides[fetch.name] = file.strides(fetch.name)
        file.read(parts, check_header=check_headers)
    return {
        name: _value(index.tensors[name], targets[name], strides.get(name), partner)
        for name, partner in partners.items()
        if name not in memory
    }


def _wanted(where: str, index: ShardedIndex, partners: Mapping[str, Any]) -> dict[str, Box]:
    """The part that this rank needs of each tensor; an empty box where it needs none."""
    known: dict[object, Box] = {}  # torch takes long for a box, and most are sharded alike
    wanted: dict[str, Box] = {}
    for name, partner in partners.items():
        logical = index.tensors.get(name)
        if logical is None:
            raise CorruptCheckpointError(where, found=f"has no tensor {name[:200]!r}")
        if partner is None:
            wanted[name] = Box.whole(logical.shape)
            continue
        kind = (partner.shape, local_part(partner).shape, sharding_of(partner))
        if kind not in known:
            empty = (0,) * len(logical.shape)
            known[kind] = box_of(partner, name) or Box(empty, empty)
        wanted[name] = known[kind]
    return wanted


def _fetches(where: str, index: ShardedIndex, wanted: dict[str, Box]) -> list[Fetch]:
    """What is to be read; together it is all that is wanted."""
    fetches = plan_fetches(index.tensors, wanted)
    missing = {name: box.num_elements for name, box in wanted.items()}
    for fetch in fetches:
        missing[fetch.name] -= fetch.wanted.num_elements
    for name, num_elements in missing.items():
        if num_elements:
            raise CorruptCheckpointError(
                f"{where}: {name}",
                found=f"parts without {num_elements} of the elements {wanted[name]}",
                expected="parts that tile the tensor",
            )
    return fetches


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


def _plain_type(logical: Logical) -> torch.dtype:
    """Numbers of the same width, which any copy leaves alone."""
    return PLAIN_TYPES[logical.element.num_bytes]


def _memory(logical: Logical, box: Box) -> Tensor:
    """Memory of its own for the part wanted of a tensor."""
    memory = torch.empty(box.sizes, dtype=_plain_type(logical), device="cpu")
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
        logical: its type, shape and parts.
        files: the data files of their writers.
    """

    name: str
    meta: Tensor
    logical: Logical
    files: DataFiles

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
            files = self.files[chunk.writer]
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
        id(meta): StoredTensor(name, meta, view.index.tensors[name], view.files)
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
    memories = [
        torch.empty(box.sizes, dtype=PLAIN_TYPES[tensor.element.num_bytes], device="cpu")
        for tensor, box in wanted
    ]
    of_files: dict[int, list[int]] = {}
    for number, (tensor, _) in enumerate(wanted):
        of_files.setdefault(id(tensor.files), []).append(number)
    for numbers in of_files.values():
        tensors = {wanted[number][0].name: wanted[number][0].logical for number in numbers}
        boxes = {wanted[number][0].name: wanted[number][1] for number in numbers}
        targets = {wanted[number][0].name: memories[number] for number in numbers}
        _fill(wanted[numbers[0]][0].files, tensors, boxes, targets)
    return memories


def _fill(
    files: DataFiles,
    tensors: Mapping[str, Logical],
    boxes: Mapping[str, Box],
    targets: Mapping[str, Tensor],
) -> None:
    fetches: dict[int, list[Fetch]] = {}
    for fetch in plan_fetches(tensors, boxes):
        fetches.setdefault(fetch.chunk.writer, []).append(fetch)
    for writer in sorted(fetches):
        for file, its_fetches in files[writer].divide(fetches[writer]):
            if its_fetches:
                file.require(its_fetches, tensors)
                parts = (file.parts(each, targets[each.name]) for each in its_fetches)
                file.read(list(chain.from_iterable(parts)), check_header=False)
