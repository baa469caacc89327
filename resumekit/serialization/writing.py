"""What one rank writes of a checkpoint: its data file, the index beside it, and small files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from resumekit.errors import CorruptCheckpointError, UnsupportedValueError
from resumekit.serialization.encoding import Encoder
from resumekit.serialization.index import Index, arrange, header, stem_of
from resumekit.serialization.leaves import Image, Leaf, digest_on_devices, pieces_of
from resumekit.serialization.planning import Assignment, LocalState
from resumekit.serialization.sharding import Logical, is_sharded
from resumekit.storage.commit import Staging
from resumekit.storage.directories import MAX_JSON_BYTES, StepName
from resumekit.storage.files import BLOCK_BYTES, FileEntry, combine, cut, digest_of_block
from resumekit.storage.io.pipeline import ThreadedCalls

PAGE_BYTES = 4096
_NO_DIGEST = "0" * 32
_NOTHING: Mapping[str, Any] = {}
_MANY_VALUES = 3_000_000  # below what the parser of the index takes


class Payload:
    """Files that one rank writes: its data file, the index beside it, and small ones.

    The leaves are live and must not change before ``copy_into`` or ``write`` returns; all else is
    independent of live objects.

    Args:
        directory: of all files, relative to the step directory.
        rank: the rank that writes.
        leaves: what goes into the data file, by name; without any there is no data file.
        ties: names without bytes of their own, with the name of the same tensor.
        states: the tree of each state, by component key; None for an index only with a data file.
        small_files: the content of other files, by file name; without ``states`` and leaves, files
            for other tools, which a resume does not read.
        frozen: names of leaves that training does not change; they have files of their own.

    Attributes:
        frozen: the files of the frozen leaves, if there are any.
        num_bytes: bytes that it will write at most; exact but for the index.
        num_files: files that it will write.

    Raises:
        UnsupportedValueError: the index would be too large.
    """

    _IS_FROZEN = False

    def __init__(
        self,
        directory: str,
        rank: int,
        leaves: Mapping[str, Leaf] = _NOTHING,
        *,
        ties: Mapping[str, str] = _NOTHING,
        states: Mapping[str, Any] | None = None,
        small_files: Mapping[str, bytes] = _NOTHING,
        frozen: Collection[str] = (),
    ) -> None:
        self.frozen: FrozenFiles | None = None
        apart = {name: leaf for name, leaf in leaves.items() if name in frozen}
        if apart:
            its_ties = {name: other for name, other in ties.items() if other in apart}
            self.frozen = FrozenFiles(directory, rank, apart, ties=its_ties)
            leaves = {name: leaf for name, leaf in leaves.items() if name not in apart}
            ties = {name: other for name, other in ties.items() if name not in its_ties}
        self._rank = rank
        self._stem = stem_of(directory, rank, is_frozen=self._IS_FROZEN)
        self._leaves = leaves
        self._image: memoryview | None = None
        self._linked: tuple[FileEntry, tuple[str, ...]] | None = None
        self._small_files = {
            f"{directory}/{name}": bytes(data) for name, data in small_files.items()
        }
        records = arrange(leaves)
        self._index = Index(states or {}, records, ties)  # but for the digests of the blocks
        self._header = header(records, ties) if records else b""
        # A reader opens the first index of a rank in any case.
        self._has_index = bool(records) or states is not None or self.frozen is not None
        self._data_bytes = len(self._header) + (records[-1].end if records else 0)
        index_bytes = self._size_of_index() if self._has_index else 0
        self.num_bytes = self._data_bytes + index_bytes + sum(map(len, small_files.values()))
        self.num_files = bool(records) + self._has_index + len(small_files)

    @classmethod
    def of_states(
        cls, directory: str, rank: int, states: Mapping[str, Any], *, frozen: Collection[str] = ()
    ) -> Payload:
        """The states of some components, written by one rank.

        Args:
            directory: of its files, relative to the step directory.
            rank: the rank that writes.
            states: nested state by component key. With one key the tensors are named by their path
                in the state (a model's by FQN); with more, the key comes first.
            frozen: names of tensors that training does not change.

        Raises:
            UnsupportedValueError: a value cannot be stored; names its path.
        """
        encoder = Encoder(prefix_names=len(states) > 1)
        trees = {key: encoder.encode(state, where=key) for key, state in states.items()}
        stored = encoder.finish()
        return cls(directory, rank, stored.leaves, ties=stored.ties, states=trees, frozen=frozen)

    @classmethod
    def of_shards(
        cls,
        directory: str,
        rank: int,
        local: LocalState,
        assignment: Assignment,
        *,
        index_name: str = "index.json",
        frozen: Collection[str] = (),
    ) -> Payload:
        """One rank's shards of a state; the first rank adds the common index.

        Args:
            directory: of its files, relative to the step directory.
            rank: the rank that writes.
            local: the state as this rank holds it.
            assignment: what this rank is to write.
            index_name: the file name of the common index.
            frozen: names of tensors that training does not change.

        Raises:
            UnsupportedValueError: a part has the name of another tensor; names it.
        """
        # Plain tensors, which every rank reads, come first: all in a block or two.
        names = sorted(assignment.names, key=lambda name: is_sharded(local.tensors[name]))
        parts = {name: list(local.leaves_of(name)) for name in names}
        frozen_parts = {part for name in names if name in frozen for part, _ in parts[name]}
        pairs = [pair for each in parts.values() for pair in each]
        small_files: dict[str, bytes] = {}
        if assignment.tensors is not None:
            pairs += local.leaves.items()
            plain = {
                name: Logical.of_one_writer(leaf.element, leaf.shape, rank)
                for name, leaf in local.leaves.items()
            }
            tensors = {**assignment.tensors, **plain}
            states = {local.key: local.tree}
            index = Index(states, ties=local.ties, tensors=tensors, is_common=True)
            small_files[index_name] = index.to_bytes()
        leaves: dict[str, Leaf] = {}
        for name, leaf in pairs:
            if leaves.setdefault(name, leaf) is not leaf:
                raise UnsupportedValueError(
                    f"{local.key}: {name}", found="also the name of a part of another tensor"
                )
        return cls(directory, rank, leaves, small_files=small_files, frozen=frozen_parts)

    @property
    def image_bytes(self) -> int:
        """The memory that ``copy_into`` needs, a multiple of a page; 0 without a data file."""
        return -(-self._data_bytes // PAGE_BYTES) * PAGE_BYTES

    def copy_into(self, memory: memoryview, *, num_threads: int = 1) -> None:
        """Copies the data file for ``write``; afterwards nothing live is referenced.

        Args:
            memory: writable and page-aligned, of ``image_bytes``; in use until ``write`` returns.
            num_threads: how many copy large tensors, the caller's thread among them.

        Raises:
            SaveError: not all bytes were copied.
        """
        assert memory.nbytes >= self.image_bytes
        if self._data_bytes:
            memory[: len(self._header)] = self._header
            image = Image(memory, num_threads=num_threads)
            with torch.no_grad(), image.copying():
                for record in self._index.records:
                    begin = len(self._header) + record.begin
                    image.copy(self._leaves[record.name].source, begin, record.num_bytes)
            self._image = memory[: self._data_bytes]
        self._leaves = {}

    def write(self, staging: Staging) -> list[FileEntry]:
        """The lines of its files in the inventory; durable at the end of ``Staging.writing``.

        May be called once: the bytes are released.

        Raises:
            ConfigurationError: a name that no file in a checkpoint can have.
            SaveError: a file could not be written.
        """
        entries = []
        index_bytes = b""
        if self._linked is not None:
            entry, digests = self._linked
            entries.append(entry)
            index_bytes = self._index_with(digests)
        elif self._index.records:
            with staging.create(f"{self._stem}.safetensors", writer=self._rank) as data:
                if self._image is None:
                    data.write(self._pieces())
                else:
                    data.write_image(self._image)
                index_bytes = self._index_with(
                    data.block_digests
                )  # while the last bytes are written
                entries.append(data.finish())
            self._leaves, self._image = {}, None
        elif self._has_index:
            index_bytes = self._index_with(())
        index_file = {f"{self._stem}.json": index_bytes} if self._has_index else {}
        for path, content in {**index_file, **self._small_files}.items():
            with staging.create(path, writer=self._rank) as file:
                file.write([memoryview(content)])
                entries.append(file.finish())
        return entries

    def _index_with(self, block_digests: tuple[str, ...]) -> bytes:
        return replace(self._index, block_digests=block_digests).to_bytes()

    def _pieces(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        yield from pieces_of(self._leaves[record.name] for record in self._index.records)

    def _size_of_index(self) -> int:
        """At most so many bytes; exact where a reader may find that it is too much."""
        num_blocks = -(-self._data_bytes // BLOCK_BYTES)
        size = self._index.size_at_most(header_bytes=len(self._header), num_blocks=num_blocks)
        if size.num_bytes <= MAX_JSON_BYTES and size.num_values <= _MANY_VALUES:
            return size.num_bytes
        data = replace(self._index, block_digests=(_NO_DIGEST,) * num_blocks).to_bytes()
        try:
            Index.from_bytes(data, where=self._stem)
        except CorruptCheckpointError as error:
            raise UnsupportedValueError(
                ", ".join(self._index.states),
                found=f"too much that is not in arrays or tensors: {error.found}",
                expected=error.expected,
                remedy="Store long lists as arrays",
            ) from error
        return len(data)


class _Source(NamedTuple):
    """The file of an earlier checkpoint to link to."""

    name: StepName
    entry: FileEntry


class FrozenFiles(Payload):
    """A rank's tensors that training does not change, in a data file of their own.

    The file is a link to the one of an earlier checkpoint where that has the same bytes.
    """

    _IS_FROZEN = True
    _source: _Source | None = None
    _digests: ThreadedCalls[list[memoryview], bytes] | None = None
    _block_digests: Sequence[bytes] = ()

    @property
    def path(self) -> str:
        """Of its data file, relative to the step directory."""
        return f"{self._stem}.safetensors"

    def compare(
        self,
        source: StepName,
        entry: FileEntry,
        known: dict[str, tuple[object, Sequence[bytes]]],
        *,
        num_threads: int,
    ) -> None:
        """Begins to compare the data file with that of an earlier checkpoint.

        Until ``finish_comparing`` it counts as equal and takes no space. The live tensors are
        digested, not copied.

        Args:
            source: the earlier checkpoint, of this launch.
            entry: its file.
            known: digests of files that tensors on other devices had, by path; it is updated. Those
                are fetched only if a digest that their device computes has changed.
            num_threads: that digest tensors in host memory while the caller continues.
        """
        if entry.size != self._data_bytes:
            return
        self._source = _Source(source, entry)
        self.num_bytes -= self._data_bytes
        blocks = cut(self._pieces(), 0, BLOCK_BYTES)
        if all(leaf.is_in_host_memory for leaf in self._leaves.values()):
            calls = list(blocks)
            self._digests = ThreadedCalls(digest_of_block, calls, num_threads=num_threads)
            return
        tensors = [
            leaf.source for leaf in self._leaves.values() if isinstance(leaf.source, torch.Tensor)
        ]
        are_all = len(tensors) == len(self._leaves) and not all(each.is_cpu for each in tensors)
        on_device = digest_on_devices(tensors) if are_all else None
        content, digests = known.get(self.path, (None, ()))
        if on_device is None or content != (self._header, on_device):
            # One by one: copies of all blocks could take up more memory than there is.
            digests = [digest_of_block(parts) for parts in blocks]
            known[self.path] = (self._header, on_device), digests
        self._block_digests = digests

    def finish_comparing(self) -> None:
        """Completes what ``compare`` has begun; then the tensors may change."""
        digests, self._digests = self._digests, None
        if digests is not None:
            self._block_digests = digests.results()
        if self._source is not None and combine(self._block_digests) != self._source.entry.digest:
            self._write_anyway()

    def stop(self) -> None:
        """Ends what ``compare`` has begun and nobody has completed; the file is not used then."""
        if self._digests is not None:
            self._digests.stop()

    @property
    def image_bytes(self) -> int:
        """As of every payload; 0 for a file that will be linked, which is not copied."""
        return 0 if self._source is not None else super().image_bytes

    def link(self, staging: Staging) -> None:
        """Links the data file if ``compare`` finds it equal; else it will be written.

        Args:
            staging: of the new checkpoint.
        """
        self.finish_comparing()
        if self._source is None:
            return
        if staging.link(self.path, self._source.name):
            self._linked = self._source.entry, tuple(each.hex() for each in self._block_digests)
            self._source = None
            self._data_bytes = 0
            self._leaves = {}
        else:
            self._write_anyway()

    def write(self, staging: Staging) -> list[FileEntry]:
        """As of every payload; a file that is equal is linked, unless ``link`` was called."""
        self.link(staging)
        return super().write(staging)

    def _write_anyway(self) -> None:
        self._source = None
        self.num_bytes += self._data_bytes
