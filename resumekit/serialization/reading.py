"""Reads states that one rank wrote whole, or several ranks in shards, as this rank needs them.

A state that one rank wrote is read as a sharded one with a single writer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from resumekit.errors import CorruptCheckpointError
from resumekit.serialization.decoding import Decoder, references
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.fetching import (
    ByteRange,
    Fetch,
    byte_ranges,
    plan_fetches,
    read_ranges,
)
from resumekit.serialization.index import Index, Logical, ShardedIndex, header, stem_of
from resumekit.serialization.layouts import part_name
from resumekit.serialization.planning import sharding_of
from resumekit.serialization.sharding import Box, box_of, local_part, sharded_like
from resumekit.serialization.tensors import PLAIN_TYPES, dense_strides, flat_bytes, retyped
from resumekit.storage import MAX_JSON_BYTES, StepReader, use_huge_pages

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
        files = _DataFiles(self.step, self.directory)
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


_AnyIndex = TypeVar("_AnyIndex", Index, ShardedIndex)


def read_index(kind: type[_AnyIndex], step: StepReader, path: str) -> _AnyIndex:
    """An index of a checkpoint, verified.

    Raises:
        CorruptCheckpointError: damage.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    with step.file(path) as file:
        return kind.from_bytes(file.read(max_bytes=MAX_JSON_BYTES), where=f"{step.name}/{path}")


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
    where, files = f"{step.name}/{stem_of(directory, rank)}.json", _DataFiles(step, directory)
    plain = files[rank].index
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
        tensors = _read(index, dict.fromkeys(names), where, files, check_headers=True)
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
        meta_tensors: the tensors of the state on the meta device, by name.
    """

    def __init__(self, source: Source, name: str, index: ShardedIndex, files: _DataFiles) -> None:
        self.where = f"{source.step.name}/{source.directory}/{name}"
        self._files = files
        self._index = index
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
        self._values |= _read(self._index, wanted, self.where, self._files)

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
    files: _DataFiles,
    *,
    check_headers: bool = False,
) -> dict[str, Tensor]:
    """Tensors by name: this rank's shard of those with a partner, the others whole.

    Args:
        index: of the tensors.
        partners: for each wanted name the live DTensor, or None.
        where: what error messages call the index.
        files: the data file of each writer.
        check_headers: whether to read and compare the header of each of these files too.
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
    memory = {name: _memory(index.tensors[name], box) for name, box in wanted.items()}
    strides: dict[str, tuple[int, ...] | None] = {}
    for file, its_fetches in divided:
        parts: list[ByteRange] = []
        for fetch in its_fetches:
            parts += file.parts(fetch, memory[fetch.name])
            if fetch.chunk.box.sizes == index.tensors[fetch.name].shape:
                strides[fetch.name] = file.strides(fetch.name)
        file.read(parts, check_header=check_headers)
    return {
        name: _value(index.tensors[name], memory[name], strides.get(name), partner)
        for name, partner in partners.items()
    }


class _DataFiles(dict[int, "_WriterFiles"]):
    """The data files of each writer in a directory; an index is read on first use."""

    def __init__(self, step: StepReader, directory: str) -> None:
        self._step = step
        self._directory = directory
        self._paths = {entry.path for entry in step.manifest.files}

    def __missing__(self, writer: int) -> _WriterFiles:
        stems = [stem_of(self._directory, writer)]
        frozen = stem_of(self._directory, writer, is_frozen=True)
        if f"{frozen}.json" in self._paths:
            stems.append(frozen)
        return self.setdefault(writer, _WriterFiles([_DataFile(self._step, s) for s in stems]))


class _WriterFiles:
    """One writer's data files, the second one with its frozen tensors.

    Attributes:
        index: of all of them together; it has no block digests.
    """

    def __init__(self, files: Sequence[_DataFile]) -> None:
        self._files = files
        records = [record for file in files for record in file.index.records]
        ties = {name: other for file in files for name, other in file.index.ties.items()}
        self.index = Index(files[0].index.states, tuple(records), ties)
        self._owners = {record.name: file for file in files for record in file.index.records}

    def divide(self, fetches: Sequence[Fetch]) -> list[tuple[_DataFile, list[Fetch]]]:
        """Each file with the fetches from it; a part that is in none is the first one's."""
        divided: list[tuple[_DataFile, list[Fetch]]] = [(file, []) for file in self._files]
        numbers = {id(file): number for number, file in enumerate(self._files)}
        for fetch in fetches:
            owner = self._owners.get(_stored_name(fetch), self._files[0])
            divided[numbers[id(owner)]][1].append(fetch)
        return divided


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
        local = retyped(memory, dtype, 0, shape, memory.stride())
        part: Tensor = sharded_like(partner, local)
        return part
    if strides is not None:  # stored row by row, needed in another order
        ordered = torch.empty_strided(shape, strides, dtype=memory.dtype, device="cpu")
        memory = ordered.copy_(memory)
    return retyped(memory, dtype, 0, shape, memory.stride())


class _DataFile:
    """One data file, by the index beside it."""

    def __init__(self, step: StepReader, stem: str) -> None:
        self.index = read_index(Index, step, f"{stem}.json")
        self._open = partial(step.file, f"{stem}.safetensors")
        self._where = f"{step.name}/{stem}.safetensors"
        self._records = {record.name: record for record in self.index.records}
        self._header = header(self.index.records, self.index.ties)

    def read(self, parts: list[ByteRange], *, check_header: bool) -> None:
        """Fills the targets of these parts of the file; compares its header, if asked to."""
        size = len(self._header) if check_header else 0
        found = torch.empty(size, dtype=torch.uint8, device="cpu")
        if check_header:
            parts = [ByteRange(0, found.numel(), found, (1,)), *parts]
        with self._open() as reader:
            read_ranges(reader, parts, self.index.block_digests)
        if check_header and flat_bytes(found) != self._header:
            raise CorruptCheckpointError(
                self._where,
                found="its header differs from what the index says of its tensors",
            )

    def strides(self, name: str) -> tuple[int, ...] | None:
        """The strides that a tensor had in memory, where they were not row-major."""
        return self._records[name].strides

    def require(self, fetches: Sequence[Fetch], tensors: Mapping[str, Logical]) -> None:
        """Raises CorruptCheckpointError unless the file is complete and has the parts to fetch."""
        with self._open() as reader:
            size = reader.entry.size
        expected = len(self._header) + (self.index.records[-1].end if self.index.records else 0)
        if size != expected:
            raise CorruptCheckpointError(
                self._where, found=f"has {size} bytes", expected=f"{expected} as its index says"
            )
        for fetch in fetches:
            record, sizes = self._records.get(_stored_name(fetch)), fetch.chunk.box.sizes
            element = tensors[fetch.name].element
            if record is None or (record.shape, record.element) != (sizes, element):
                raise CorruptCheckpointError(
                    self._where,
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
        begin = len(self._header) + record.begin
        return byte_ranges(fetch.stored, record.shape, begin, target)


def _stored_name(fetch: Fetch) -> str:
    return part_name(fetch.name, fetch.chunk.number)


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
