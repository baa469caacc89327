"""From the parts that several ranks wrote to the parts that this rank needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resumekit.errors import CorruptCheckpointError
from resumekit.serialization.blocks import BlockReader
from resumekit.serialization.decode import Decoder
from resumekit.serialization.index import Index
from resumekit.serialization.layout import header
from resumekit.serialization.leaves import PLAIN_TYPES, dense_strides, retyped
from resumekit.serialization.payload import read_index, stem_of
from resumekit.serialization.sharded.fetch import Fetch, plan_fetches
from resumekit.serialization.sharded.index import Logical, ShardedIndex, part_name
from resumekit.serialization.sharded.stretch import Stretch, read_stretches, stretches
from resumekit.serialization.sharding import Box, box_of, sharded_like
from resumekit.storage import MAX_JSON_BYTES, StepReader

# Pairs of a tensor of the state without values and the live DTensor whose part is wanted of it.
Pairs = Iterable[tuple[Tensor, Any]]


# What is left out of a state, and what is put together from several: see ``Stateful``.
Merge = Callable[[list[Any]], Any]
PartOf = Callable[[Any], Any]


@dataclass(frozen=True)
class Source:
    """Where a component stands in a checkpoint.

    Args:
        step: the checkpoint.
        directory: of the component.
        key: of the component.
        indices: the file names of its indices, one for each group that wrote parts of it; none
            where rank ``writer`` wrote it whole.
        writer: the rank that wrote it whole.
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


def read_sharded(
    source: Source,
    pair: Callable[[Any], Pairs],
    check: Callable[[Any], None] = lambda state: None,
    *,
    merge: Merge = lambda states: states[0],
    part_of: PartOf | None = None,
) -> tuple[Any, frozenset[str]]:
    """The state of one component, with this rank's part of what is spread; all of it verified.

    Only the blocks that hold wanted bytes are read, into host memory.

    Args:
        source: where it stands.
        pair: given the state with tensors of the meta device in the place of all tensors, the live
            DTensor that each is to be spread like; a tensor without one is read whole.
        check: given the same, refuses it before anything more is read.
        merge: one state of those of all groups.
        part_of: what this rank needs of a state; by default all of it.

    Returns:
        The state, and the names of the tensors that are not part of what this rank needs.

    Raises:
        CorruptCheckpointError: damage; names the file.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    views = source.views()

    def put_together(states: list[Any]) -> Any:
        merged = merge(states)
        return merged if part_of is None else part_of(merged)

    skeleton = put_together([view.skeleton for view in views])
    check(skeleton)
    partners = {id(saved): live for saved, live in pair(skeleton)}
    needed = None if part_of is None else set(map(id, _tensors_in(skeleton)))
    for view in views:
        view.read(partners, needed)
    state = put_together([view.state() for view in views])
    if len(views) > 1:
        check(state)  # what only values tell, such as a learning rate that is a tensor
    taken = {name for view in views for name in view.taken(needed)}
    return state, frozenset({name for view in views for name in view.spread} - taken)


class _View:
    """What one group wrote of a component, by its index.

    Attributes:
        skeleton: the state, with tensors of the meta device in the place of tensors; what is not
            a tensor is there.
        spread: those tensors, by name.
    """

    def __init__(self, source: Source, name: str, index: ShardedIndex) -> None:
        self.where = f"{source.step.name}/{source.directory}/{name}"
        self._source = source
        self._index = index
        if source.key not in index.states:
            raise CorruptCheckpointError(self.where, found=f"has no state of {source.key!r}")
        self._tree = index.states[source.key]
        whole = set(_names_of_bytes(self._tree))
        self._values = self._read(dict.fromkeys(whole))
        shapes = {name: _without_values(logical) for name, logical in index.tensors.items()}
        self.spread = {name: tensor for name, tensor in shapes.items() if name not in whole}
        self.skeleton = self._decoded({**shapes, **self._values})

    def read(self, partners: Mapping[int, Any], needed: set[int] | None) -> None:
        """Reads the tensors of the skeleton.

        Args:
            partners: the live DTensor that a tensor of the skeleton is to be spread like, by id.
            needed: the ids of those that are needed; None for all.
        """
        named = set(_names_of_tensors(self._tree))
        self._values |= self._read(
            {name: partners.get(id(self.spread[name])) for name in self.taken(needed) & named}
        )

    def taken(self, needed: set[int] | None) -> set[str]:
        """The names of the tensors that are needed."""
        if needed is None:
            return set(self.spread)
        return {name for name, tensor in self.spread.items() if id(tensor) in needed}

    def state(self) -> Any:
        """The state with the tensors that have been read."""
        return self._decoded({**self.spread, **self._values})

    def _decoded(self, tensors: Mapping[str, Tensor]) -> Any:
        return Decoder(tensors, where=self.where).decode(self._tree)

    def _read(self, partners: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of these names: this rank's part where there is a partner, else all of it."""
        return _read(self._source, self.where, self._index, partners)


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
    source: Source, where: str, index: ShardedIndex, partners: Mapping[str, Any]
) -> dict[str, Tensor]:
    wanted = {
        name: _wanted(where, index.tensors.get(name), name, partner)
        for name, partner in partners.items()
    }
    fetches = _fetches(where, index, wanted)
    files = {
        writer: _DataFile(source.step, source.directory, writer)
        for writer in sorted({fetch.chunk.writer for fetch in fetches})
    }
    for fetch in fetches:  # before memory is asked for: the index may promise more than there is
        files[fetch.chunk.writer].require(fetch, index.tensors[fetch.name])
    memory = {
        name: torch.empty(box.sizes, dtype=_plain_type(index.tensors[name]), device="cpu")
        for name, box in wanted.items()
    }
    for writer, file in files.items():
        mine = [fetch for fetch in fetches if fetch.chunk.writer == writer]
        parts = [part for fetch in mine for part in file.stretches(fetch, memory[fetch.name])]
        read_stretches(file.open, parts, file.index.block_digests)
    strides = {
        fetch.name: files[fetch.chunk.writer].strides(fetch.name)
        for fetch in fetches
        if fetch.chunk.box.sizes == index.tensors[fetch.name].shape
    }
    return {
        name: _value(index.tensors[name], memory[name], strides.get(name), partner)
        for name, partner in partners.items()
    }


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
        ordered = torch.empty_strided(shape, strides, dtype=memory.dtype)
        memory = ordered.copy_(memory)
    return retyped(memory, dtype, 0, shape, memory.stride())


class _DataFile:
    """One writer's data file, by the index beside it."""

    def __init__(self, step: StepReader, directory: str, writer: int) -> None:
        stem = stem_of(directory, writer)
        self._step = step
        self._path = f"{stem}.safetensors"
        self.index: Index = read_index(step, stem)
        self._records = {record.name: record for record in self.index.records}
        self._begin = len(header(self.index.records, self.index.ties))
        self._check_size()

    def open(self) -> BlockReader:
        """The file, for verified reading."""
        return self._step.file(self._path)

    def strides(self, name: str) -> tuple[int, ...] | None:
        """The strides that a tensor had in memory, where they were not row-major."""
        return self._records[name].strides

    def require(self, fetch: Fetch, logical: Logical) -> None:
        """Raises CorruptCheckpointError unless the part that is to be fetched is there."""
        record, sizes = self._records.get(_stored_name(fetch)), fetch.chunk.box.sizes
        if record is None or record.shape != sizes or record.element != logical.element:
            raise CorruptCheckpointError(
                f"{self._step.name}/{self._path}",
                found=f"its index has no {_stored_name(fetch)[:200]!r} of shape {sizes}",
                expected="the part that the index of all ranks tells of",
            )

    def stretches(self, fetch: Fetch, memory: Tensor) -> Iterator[Stretch]:
        """Where in the file the elements are that are to be fetched.

        Args:
            fetch: one that ``require`` has let pass.
            memory: of the part wanted; the elements go to their place in it.
        """
        record = self._records[_stored_name(fetch)]
        cut = tuple(
            slice(begin, begin + size)
            for begin, size in zip(fetch.wanted.offsets, fetch.wanted.sizes, strict=True)
        )
        return stretches(fetch.stored, record.shape, self._begin + record.begin, memory[cut])

    def _check_size(self) -> None:
        reader = self.open()
        reader.close()
        expected = self._begin + (self.index.records[-1].end if self.index.records else 0)
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


def _names_of_bytes(tree: Any) -> Iterator[str]:
    """The tensors that a tree decodes bytes from, or views: they are always needed whole."""
    for tag, body in _references(tree):
        if tag == "$tensor" and isinstance(body, dict):
            yield str(body.get("of"))
        elif tag == "$blob":
            yield str(body)
        elif tag in ("$array", "$numbers") and isinstance(body, list):
            yield str(body[-1:] and body[-1])


def _names_of_tensors(tree: Any) -> Iterator[str]:
    for tag, body in _references(tree):
        if tag == "$tensor" and not isinstance(body, dict):
            yield str(body)


def _references(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, list):
        for item in tree:
            yield from _references(item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            if key in ("$tensor", "$blob", "$array", "$numbers"):
                yield key, item
            else:
                yield from _references(item)
