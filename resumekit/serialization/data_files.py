"""The data files of a checkpoint: found by the indices beside them, read by ranges of bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from resumekit.errors import CorruptCheckpointError
from resumekit.serialization.deferral import LoadMemory
from resumekit.serialization.index import MIN_RECORD_BYTES, Index, header, stem_of
from resumekit.serialization.leaves import dense_strides, flat_bytes
from resumekit.serialization.sharding import Box, Chunk, Layout, Logical, part_name
from resumekit.storage.directories import MAX_JSON_BYTES
from resumekit.storage.file_reader import FileReader
from resumekit.storage.files import BLOCK_BYTES, Piece
from resumekit.storage.manifest import StepReader


def read_index(step: StepReader, path: str, *, is_common: bool = False) -> Index:
    """An index of a checkpoint, verified.

    Raises:
        CorruptCheckpointError: damage.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    with step.file(path) as file:
        data = file.read(max_bytes=MAX_JSON_BYTES)
    # A few characters can ask for any number of parts; each one is a line of its writer's index.
    num_bytes = sum(each.size for each in step.manifest.files if each.path.endswith(".json"))
    max_parts = num_bytes // MIN_RECORD_BYTES
    where = f"{step.name}/{path}"
    return Index.from_bytes(data, where=where, is_common=is_common, max_parts=max_parts)


class DataFiles(dict[int, "WriterFiles"]):
    """The data files of each writer in a directory; an index is read on first use."""

    def __init__(self, step: StepReader, directory: str) -> None:
        self._step = step
        self._directory = directory
        self._paths = {entry.path for entry in step.manifest.files}

    def __missing__(self, writer: int) -> WriterFiles:
        stems = [stem_of(self._directory, writer)]
        frozen = stem_of(self._directory, writer, is_frozen=True)
        if f"{frozen}.json" in self._paths:
            stems.append(frozen)
        files = [DataFile(self._step, stem) for stem in stems]
        return self.setdefault(writer, WriterFiles(writer, files))


class WriterFiles:
    """One writer's data files, the second one with its frozen tensors."""

    def __init__(self, writer: int, files: Sequence[DataFile]) -> None:
        self._writer = writer
        self._files = files
        self._owners = {record.name: file for file in files for record in file.index.records}

    @cached_property
    def index(self) -> Index:
        """Of all of them together, with whole tensors; it has no block digests."""
        records = [record for file in self._files for record in file.index.records]
        ties = {name: other for file in self._files for name, other in file.index.ties.items()}
        tensors = {
            each.name: Logical.of_one_writer(each.element, each.shape, self._writer)
            for each in records
        }
        return Index(self._files[0].index.states, tuple(records), ties, tensors=tensors)

    def divide(self, fetches: Sequence[Fetch]) -> list[tuple[DataFile, list[Fetch]]]:
        """Each file with the fetches from it; a part that is in none is the first one's."""
        divided: list[tuple[DataFile, list[Fetch]]] = [(file, []) for file in self._files]
        numbers = {id(file): number for number, file in enumerate(self._files)}
        for fetch in fetches:
            owner = self._owners.get(_stored_name(fetch), self._files[0])
            divided[numbers[id(owner)]][1].append(fetch)
        return divided

    def block_digests(self, stored_name: str) -> tuple[int, tuple[str, ...]]:
        """See ``DataFile.block_digests_of``; of a part that is in no file, an error."""
        return self._owners.get(stored_name, self._files[0]).block_digests_of(stored_name)


class DataFile:
    """One data file, by the index beside it."""

    def __init__(self, step: StepReader, stem: str) -> None:
        self.index = read_index(step, f"{stem}.json")
        self._open = partial(step.file, f"{stem}.safetensors")
        self._where = f"{step.name}/{stem}.safetensors"
        self._records = {record.name: record for record in self.index.records}
        self._header = header(self.index.records, self.index.ties)
        self._are_digests_checked = False

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

    def block_digests_of(self, stored_name: str) -> tuple[int, tuple[str, ...]]:
        """Where a stored tensor begins in its first block, and the digests of all its blocks.

        Where two files agree in both, the bytes of the tensor are equal.

        Raises:
            CorruptCheckpointError: the digests are not those of the manifest, or it is not there.
        """
        if not self._are_digests_checked:
            with self._open() as reader:
                reader.read_pieces([], self.index.block_digests)
            self._are_digests_checked = True
        record = self._records.get(stored_name)
        if record is None:
            raise self._lacks(f"{stored_name[:200]!r}")
        begin = len(self._header) + record.begin
        first, end = begin // BLOCK_BYTES, -(-(begin + record.num_bytes) // BLOCK_BYTES)
        return begin % BLOCK_BYTES, self.index.block_digests[first:end]

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
                raise self._lacks(f"{_stored_name(fetch)[:200]!r} of shape {sizes}")

    def _lacks(self, part: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            self._where,
            found=f"its index has no {part}",
            expected="the part that the index of all ranks lists",
        )

    def memory_of(
        self,
        fetches: Sequence[Fetch],
        names: Collection[str],
        tensors: Mapping[str, Logical],
        load_memory: LoadMemory,
    ) -> dict[str, Tensor]:
        """Memory for some of the tensors to fetch, in the order of the file."""
        begins = {
            fetch.name: len(self._header) + self._records[_stored_name(fetch)].begin
            for fetch in fetches
            if fetch.name in names
        }
        found: dict[str, Tensor] = {}
        for name, begin in sorted(begins.items(), key=lambda item: item[1]):
            memory = load_memory.take(tensors[name], begin)
            if memory is not None:
                found[name] = memory
        return found

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


@dataclass(frozen=True)
class Fetch:
    """A box to be copied out of one stored part.

    Args:
        name: of the tensor.
        chunk: the stored part.
        stored: where the box lies in that part.
        wanted: where it lies in the part wanted.
    """

    name: str
    chunk: Chunk
    stored: Box
    wanted: Box


def plan_fetches(tensors: Mapping[str, Logical], wanted: Mapping[str, Box]) -> list[Fetch]:
    """What is to be read so that the wanted parts are there.

    Args:
        tensors: where the parts of each tensor are.
        wanted: the part wanted of each, by name.
    """
    # Most tensors are sharded like another, and in the index those share one list of chunks.
    overlaps: dict[tuple[int, Box], list[_Overlap]] = {}
    fetches = []
    for name, box in wanted.items():
        chunks = tensors[name].chunks
        if (id(chunks), box) not in overlaps:
            overlaps[id(chunks), box] = list(find_overlaps(chunks, box))
        fetches += [Fetch(name, *overlap) for overlap in overlaps[id(chunks), box]]
    return fetches


_Overlap = tuple[Chunk, Box, Box]


def find_overlaps(chunks: Layout, wanted: Box) -> Iterator[_Overlap]:
    """The chunks that hold a part of a box, where that part lies in them, and where in the box."""
    if len(chunks) == 1:  # the usual case, without the search
        (chunk,) = chunks
        if chunk.box == wanted and wanted.num_elements:
            yield chunk, wanted.relative_to(wanted), wanted.relative_to(wanted)
            return
    for chunk in chunks.near(wanted):
        common = chunk.box.intersection(wanted)
        if common.num_elements:
            yield chunk, common.relative_to(chunk.box), common.relative_to(wanted)


_MAX_RANGE_BYTES = 16 << 20


@dataclass(frozen=True)
class ByteRange:
    """Consecutive bytes of a data file, and the memory for the wanted elements among them.

    Args:
        offset: in the file.
        num_bytes: from the first wanted element to the last.
        target: memory of the wanted elements' shape, contiguous or not; on the meta device where
            they are verified only.
        strides: of the wanted elements in the file, in elements.
    """

    offset: int
    num_bytes: int
    target: torch.Tensor
    strides: tuple[int, ...]

    @property
    def is_direct(self) -> bool:
        """Whether the bytes can be read into the target without a copy."""
        return self.num_bytes == self.target.nbytes and self.target.is_contiguous()

    def memory(self) -> torch.Tensor | None:
        """Memory for the bytes: the target where they need no copy; None where they need none."""
        if self.target.is_meta:
            return None
        if self.is_direct:
            return self.target
        return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def copy_from(self, memory: torch.Tensor) -> None:
        """Copies the wanted elements of the bytes that were read into the target."""
        found = memory.view(self.target.dtype)
        self.target.copy_(found.as_strided(self.target.shape, self.strides))


def byte_ranges(
    stored: Box, sizes: Sequence[int], begin: int, target: torch.Tensor
) -> Iterator[ByteRange]:
    """The byte ranges that hold a box of a row-major tensor, of about 16 MiB at most.

    One that needs no copy may have any length.

    Args:
        stored: the box, in the tensor that is stored.
        sizes: the shape of that tensor.
        begin: where its bytes begin in the file.
        target: memory of the box's shape.
    """
    strides = dense_strides(tuple(sizes))
    first = sum(o * s for o, s in zip(stored.offsets, strides, strict=True))
    extent = 1 + sum((n - 1) * s for n, s in zip(stored.sizes, strides, strict=True))
    width = target.element_size()
    found = ByteRange(begin + first * width, extent * width, target, strides)
    if found.is_direct or found.num_bytes <= _MAX_RANGE_BYTES or target.numel() == 1:
        yield found
        return
    dimension = next(d for d, size in enumerate(stored.sizes) if size > 1)
    half = stored.sizes[dimension] // 2
    for start, length in ((0, half), (half, stored.sizes[dimension] - half)):
        offsets, lengths = list(stored.offsets), list(stored.sizes)
        offsets[dimension] += start
        lengths[dimension] = length
        part = Box(tuple(offsets), tuple(lengths))
        yield from byte_ranges(part, sizes, begin, target.narrow(dimension, start, length))


def read_ranges(
    reader: FileReader, wanted: Iterable[ByteRange], block_digests: Sequence[str]
) -> None:
    """Reads byte ranges of one file, each block once, and fills their targets.

    Args:
        reader: of the file.
        wanted: in any order; none overlaps another.
        block_digests: of all blocks of the file.

    Raises:
        CheckpointError: from the reader.
    """
    for batch in _batches(sorted(wanted, key=lambda each: each.offset)):
        memories = [each.memory() for each in batch]
        pieces = [
            Piece(each.offset, each.num_bytes, None if memory is None else flat_bytes(memory))
            for each, memory in zip(batch, memories, strict=True)
        ]
        reader.read_pieces(pieces, block_digests)
        for each, memory in zip(batch, memories, strict=True):
            if memory is not None and memory is not each.target:
                each.copy_from(memory)


def _batches(ordered: Sequence[ByteRange]) -> Iterator[list[ByteRange]]:
    """Groups of ranges whose copies fit into a little memory together."""
    batch: list[ByteRange] = []
    num_bytes = 0
    for each in ordered:
        needed = 0 if each.is_direct else each.num_bytes
        if needed and num_bytes + needed > 2 * _MAX_RANGE_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(each)
        num_bytes += needed
    if batch:
        yield batch
