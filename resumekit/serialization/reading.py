"""Reads states that one rank wrote whole, or several ranks in shards, as this rank needs them.

A state that one rank wrote is read as a sharded one with a single writer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resumekit.errors import CorruptCheckpointError
from resumekit.serialization.decoding import Decoder, references
from resumekit.serialization.fetching import (
    ByteRange,
    Fetch,
    byte_ranges,
    plan_fetches,
    read_ranges,
)
from resumekit.serialization.index import Index, Logical, ShardedIndex, header, part_name, stem_of
from resumekit.serialization.sharding import Box, box_of, sharded_like
from resumekit.serialization.tensors import PLAIN_TYPES, dense_strides, flat_bytes, retyped
from resumekit.storage import MAX_JSON_BYTES, FileReader, StepReader

# A tensor of the state on the meta device, and the live DTensor that defines the wanted shard.
Pairs = Iterable[tuple[Tensor, Any]]

# How states of several groups are merged, and which entries this rank needs: see ``Stateful``.
Merge = Callable[[list[Any]], Any]
PartOf = Callable[[Any], Any]


@dataclass(frozen=True)
class Source:
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
        if not self.indices:
            plain = read_index(self.step, stem_of(self.directory, self.writer))
            name = f"rank-{self.writer:05d}.json"
            return [_View(self, name, ShardedIndex.of_one_writer(plain, self.writer))]
        return [_View(self, name, self._index(name)) for name in self.indices]

    def _index(self, name: str) -> ShardedIndex:
        with self.step.file(f"{self.directory}/{name}") as file:
            data = file.read(max_bytes=MAX_JSON_BYTES)
        return ShardedIndex.from_bytes(data, where=f"{self.step.name}/{self.directory}/{name}")


def read_index(step: StepReader, stem: str) -> Index:
    """The index of one rank's files, verified.

    Raises:
        CorruptCheckpointError: damage.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    with step.file(f"{stem}.json") as file:
        data = file.read(max_bytes=MAX_JSON_BYTES)
    return Index.from_bytes(data, where=f"{step.name}/{stem}.json")


def read_payload(
    step: StepReader, directory: str, rank: int, keys: Collection[str] | None = None
) -> dict[str, Any]:
    """The states that a rank wrote, every byte of them verified.

    Args:
        step: the checkpoint.
        directory: as given to ``Payload``.
        rank: the rank that wrote.
        keys: the component keys to read; all by default.

    Raises:
        CorruptCheckpointError: damage or a missing key; names the file.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    stem = stem_of(directory, rank)
    where, plain = f"{step.name}/{stem}.json", read_index(step, stem)
    wanted = list(plain.states) if keys is None else list(keys)
    for key in wanted:
        if key not in plain.states:
            raise CorruptCheckpointError(where, found=f"has no state of {key!r}")
    tensors: dict[str, Tensor] = {}
    if plain.records:
        index = ShardedIndex.of_one_writer(plain, rank)
        names = set(index.tensors)
        if keys is not None:
            names &= {name for name, _ in references([plain.states[key] for key in wanted])}
        file = _DataFile(step, directory, rank, plain)
        tensors = _read(index, dict.fromkeys(names), where, {rank: file}, check_headers=True)
    decoder = Decoder(tensors, where=where)
    return {key: decoder.decode(plain.states[key]) for key in wanted}


def read_sharded(
    source: Source,
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

    skeleton = merged([view.skeleton for view in views])
    check(skeleton)
    partners = {id(saved): live for saved, live in pair(skeleton)}
    needed = None if part_of is None else set(map(id, _tensors_in(skeleton)))
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
        skeleton: the state with tensors on the meta device; all other values are real.
        meta_tensors: those tensors, by name.
    """

    def __init__(self, source: Source, name: str, index: ShardedIndex) -> None:
        self.where = f"{source.step.name}/{source.directory}/{name}"
        self._files = _DataFiles(source.step, source.directory)
        self._index = index
        if source.key not in index.states:
            raise CorruptCheckpointError(self.where, found=f"has no state of {source.key!r}")
        self._tree = index.states[source.key]
        whole = {name for name, is_whole in references(self._tree) if is_whole}
        self._values = self._read(dict.fromkeys(whole))
        shapes = {name: _without_values(logical) for name, logical in index.tensors.items()}
        self.meta_tensors = {name: tensor for name, tensor in shapes.items() if name not in whole}
        self.skeleton = self._decoded({**shapes, **self._values})

    def read(self, partners: Mapping[int, Any], needed: set[int] | None) -> None:
        """Reads the tensors of the skeleton.

        Args:
            partners: the live DTensor whose placements a tensor of the skeleton gets, by id.
            needed: the ids of the needed ones; None for all.
        """
        named = {name for name, is_whole in references(self._tree) if not is_whole}
        self._values |= self._read(
            {name: partners.get(id(self.meta_tensors[name])) for name in self.taken(needed) & named}
        )

    def taken(self, needed: set[int] | None) -> set[str]:
        """The names of the tensors that are needed."""
        if needed is None:
            return set(self.meta_tensors)
        return {name for name, tensor in self.meta_tensors.items() if id(tensor) in needed}

    def state(self) -> Any:
        """The state with the tensors that have been read."""
        return self._decoded({**self.meta_tensors, **self._values})

    def _decoded(self, tensors: Mapping[str, Tensor]) -> Any:
        return Decoder(tensors, where=self.where).decode(self._tree)

    def _read(self, partners: Mapping[str, Any]) -> dict[str, Tensor]:
        """Tensors by name: this rank's shard of those with a partner, the others whole."""
        return _read(self._index, partners, self.where, self._files)


def _tensors_in(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for item in state.values():
            yield from _tensors_in(item)
    elif isinstance(state, (list, tuple, deque)):
        for item in state:
            yield from _tensors_in(item)


def _read(
    index: ShardedIndex,
    partners: Mapping[str, Any],
    where: str,
    files: Mapping[int, _DataFile],
    *,
    check_headers: bool = False,
) -> dict[str, Tensor]:
    """Tensors by name: this rank's shard of those with a partner, the others whole.

    Args:
        index: of the tensors.
        partners: for each wanted name the live DTensor, or None.
        where: what error messages call the index.
        files: the data file of each writer, opened on demand.
        check_headers: whether to read and compare the header of each file too.
    """
    wanted = {
        name: _wanted(where, index.tensors.get(name), name, partner)
        for name, partner in partners.items()
    }
    fetches: dict[int, list[Fetch]] = {writer: [] for writer in files} if check_headers else {}
    for fetch in _fetches(where, index, wanted):
        fetches.setdefault(fetch.chunk.writer, []).append(fetch)
    # Before memory is allocated: the index may promise more than the files hold.
    used = {writer: files[writer] for writer in sorted(fetches)}
    for writer, file in used.items():
        for fetch in fetches[writer]:
            file.require(fetch, index.tensors[fetch.name])
    memory = {
        name: torch.empty(box.sizes, dtype=_plain_type(index.tensors[name]), device="cpu")
        for name, box in wanted.items()
    }
    strides: dict[str, tuple[int, ...] | None] = {}
    for writer, file in used.items():
        parts: list[ByteRange] = []
        for fetch in fetches[writer]:
            parts += file.parts(fetch, memory[fetch.name])
            if fetch.chunk.box.sizes == index.tensors[fetch.name].shape:
                strides[fetch.name] = file.strides(fetch.name)
        file.read(parts, check_header=check_headers)
    return {
        name: _value(index.tensors[name], memory[name], strides.get(name), partner)
        for name, partner in partners.items()
    }


class _DataFiles(dict[int, "_DataFile"]):
    """The data file of each writer of a component, opened on first use."""

    def __init__(self, step: StepReader, directory: str) -> None:
        self._arguments = (step, directory)

    def __missing__(self, writer: int) -> _DataFile:
        step, directory = self._arguments
        index = read_index(step, stem_of(directory, writer))
        return self.setdefault(writer, _DataFile(step, directory, writer, index))


def _wanted(where: str, logical: Logical | None, name: str, partner: Any) -> Box:
    if logical is None:
        raise CorruptCheckpointError(where, found=f"has no tensor {name[:200]!r}")
    box = Box.whole(logical.shape) if partner is None else box_of(partner, name)
    none_of_it = (0,) * len(logical.shape)
    return Box(none_of_it, none_of_it) if box is None else box


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
    dtype = logical.element.torch_dtype
    assert dtype is not None  # the index has been checked
    shape = tuple(memory.shape)
    if partner is not None:
        local = retyped(memory, dtype, 0, shape, memory.stride())
        part: Tensor = sharded_like(partner, local)
        return part
    if strides is not None:  # stored row by row, needed in another order
        ordered = torch.empty_strided(shape, strides, dtype=memory.dtype, device="cpu")
        memory = ordered.copy_(memory)
    return retyped(memory, dtype, 0, shape, memory.stride())


class _DataFile:
    """One writer's data file, by the index beside it."""

    def __init__(self, step: StepReader, directory: str, writer: int, index: Index) -> None:
        self._step = step
        self._path = f"{stem_of(directory, writer)}.safetensors"
        self._index = index
        self._records = {record.name: record for record in index.records}
        self._header = header(index.records, index.ties)
        self._begin = len(self._header)
        self._check_size()

    def _open(self) -> FileReader:
        return self._step.file(self._path)

    def read(self, parts: list[ByteRange], *, check_header: bool) -> None:
        """Fills the targets of these parts of the file; compares its header, if asked to."""
        size = len(self._header) if check_header else 0
        found = torch.empty(size, dtype=torch.uint8, device="cpu")
        if check_header:
            parts = [ByteRange(0, found.numel(), found, (1,)), *parts]
        read_ranges(self._open, parts, self._index.block_digests)
        if check_header and flat_bytes(found) != self._header:
            raise CorruptCheckpointError(
                f"{self._step.name}/{self._path}",
                found="its header differs from what the index says of its tensors",
            )

    def strides(self, name: str) -> tuple[int, ...] | None:
        """The strides that a tensor had in memory, where they were not row-major."""
        return self._records[name].strides

    def require(self, fetch: Fetch, logical: Logical) -> None:
        """Raises CorruptCheckpointError unless the file has the part to fetch."""
        record, sizes = self._records.get(_stored_name(fetch)), fetch.chunk.box.sizes
        if record is None or record.shape != sizes or record.element != logical.element:
            raise CorruptCheckpointError(
                f"{self._step.name}/{self._path}",
                found=f"its index has no {_stored_name(fetch)[:200]!r} of shape {sizes}",
                expected="the part that the index of all ranks lists",
            )

    def parts(self, fetch: Fetch, memory: Tensor) -> Iterator[ByteRange]:
        """The byte ranges of the elements to fetch.

        Args:
            fetch: accepted by ``require``.
            memory: of the wanted part; receives the elements.
        """
        record = self._records[_stored_name(fetch)]
        target = memory[fetch.wanted.slices]
        return byte_ranges(fetch.stored, record.shape, self._begin + record.begin, target)

    def _check_size(self) -> None:
        reader = self._open()
        reader.close()
        expected = self._begin + (self._index.records[-1].end if self._index.records else 0)
        if reader.entry.size != expected:
            raise CorruptCheckpointError(
                f"{self._step.name}/{self._path}",
                found=f"has {reader.entry.size} bytes",
                expected=f"{expected} as its index says",
            )


def _stored_name(fetch: Fetch) -> str:
    return part_name(fetch.name, fetch.chunk.number)


def _plain_type(logical: Logical) -> torch.dtype:
    """Numbers of the same width, which any copy leaves alone."""
    return PLAIN_TYPES[logical.element.num_bytes]


def _without_values(logical: Logical) -> Tensor:
    dtype = logical.element.torch_dtype
    assert dtype is not None  # the index has been checked
    return torch.empty_strided(
        logical.shape, dense_strides(logical.shape), dtype=dtype, device="meta"
    )
