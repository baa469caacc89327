"""A data file and the index beside it, as one rank writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from resumekit.errors import CorruptCheckpointError, UnsupportedValueError
from resumekit.serialization.encoding import Encoder
from resumekit.serialization.index import Index, Logical, ShardedIndex, arrange, header, stem_of
from resumekit.serialization.planning import Assignment, LocalState
from resumekit.serialization.sharding import is_sharded
from resumekit.serialization.tensors import Leaf
from resumekit.storage import BLOCK_BYTES, MAX_JSON_BYTES, FileEntry, FileWriter, Staging

_NO_DIGEST = "0" * 32
_BATCH_BYTES = 16 << 20
_MANY_VALUES = 500_000  # far below what the parser of the index takes


class _RankFiles:
    """What one rank writes under one stem, ``<stem>.safetensors`` and ``<stem>.json``.

    Nothing is copied, and nothing written before ``write``: the leaves must not change until then.

    Args:
        stem: the path of both files without the suffix, relative to the step directory.
        rank: the rank that writes.
        leaves: what goes into the data file, by name; without any there is no data file.
        ties: names without bytes of their own, with the name of the same tensor.
        states: the tree of each state, by component key.

    Raises:
        UnsupportedValueError: the index would be too large.
    """

    def __init__(
        self,
        stem: str,
        rank: int,
        leaves: Mapping[str, Leaf],
        *,
        ties: Mapping[str, str],
        states: Mapping[str, Any],
    ) -> None:
        self._stem = stem
        self._rank = rank
        self._leaves = leaves
        self._ties = ties
        self._states = states
        self._records = arrange(leaves)
        self._header = header(self._records, ties) if self._records else b""
        self._data_bytes = len(self._header) + (self._records[-1].end if self._records else 0)
        self._index_bytes = self._size_of_index()

    @property
    def num_bytes(self) -> int:
        """Bytes that it will write."""
        return self._data_bytes + self._index_bytes

    @property
    def num_files(self) -> int:
        """Files that it will write."""
        return 2 if self._records else 1

    def write(self, staging: Staging) -> list[FileEntry]:
        """The lines of its files in the inventory, once their bytes survive a power cut.

        Raises:
            SaveError: a file could not be written.
        """
        entries = []
        block_digests: tuple[str, ...] = ()
        if self._records:
            with staging.create(f"{self._stem}.safetensors", writer=self._rank) as data:
                _write_pieces(data, self._pieces())
                entries.append(data.finish())
                block_digests = data.block_digests
        with staging.create(f"{self._stem}.json", writer=self._rank) as index:
            index.write([memoryview(self._index(block_digests).to_bytes())])
            entries.append(index.finish())
        return entries

    def _pieces(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        for record in self._records:
            yield from self._leaves[record.name].buffers()

    def _index(self, block_digests: tuple[str, ...]) -> Index:
        return Index(self._states, self._records, self._ties, block_digests)

    def _size_of_index(self) -> int:
        num_blocks = -(-self._data_bytes // BLOCK_BYTES)
        data = self._index((_NO_DIGEST,) * num_blocks).to_bytes()
        if len(data) > MAX_JSON_BYTES or data.count(b",") > _MANY_VALUES:
            try:
                Index.from_bytes(data, where=self._stem)
            except CorruptCheckpointError as error:
                raise UnsupportedValueError(
                    ", ".join(self._states),
                    found=f"too much that is not in arrays or tensors: {error.found}",
                    expected=error.expected,
                    remedy="Store long lists as arrays",
                ) from error
        return len(data)


class Payload(_RankFiles):
    """The states of some components, ready to be written by one rank.

    Nothing is copied, and nothing written before ``write``: the states must not change until then.

    Args:
        directory: where its files go, relative to the step directory.
        rank: the rank that writes.
        states: nested state by component key. With one key the tensors are named by their place in
            the state (a model's by FQN); with more, the key comes first.

    Raises:
        UnsupportedValueError: a value cannot be stored; names its place.
    """

    def __init__(self, directory: str, rank: int, states: Mapping[str, Any]) -> None:
        encoder = Encoder(prefix_names=len(states) > 1)
        trees = {key: encoder.encode(state, where=key) for key, state in states.items()}
        stored = encoder.finish()
        super().__init__(
            stem_of(directory, rank), rank, stored.leaves, ties=stored.ties, states=trees
        )


def index_name(first_rank: int, is_in_stages: bool) -> str:
    """The file name of the index of one group's parts.

    Args:
        first_rank: of the group; it writes the index.
        is_in_stages: whether other groups hold other entries of the state.
    """
    return f"index-{first_rank:05d}.json" if is_in_stages else "index.json"


class ShardedPayload:
    """One rank's parts of a state, ready to be written; the first rank adds the index of all parts.

    Nothing is copied, and nothing written before ``write``: the state must not change until then.

    Args:
        directory: where its files go, relative to the step directory.
        rank: the rank that writes.
        local: the state as this rank holds it.
        assignment: what this rank is to write.
        index_name: the file name of the index.
    """

    def __init__(
        self,
        directory: str,
        rank: int,
        local: LocalState,
        assignment: Assignment,
        *,
        index_name: str = "index.json",
    ) -> None:
        self._rank = rank
        # What every rank reads stands together: in a block or two, not in one of each large part.
        names = sorted(assignment.names, key=lambda name: is_sharded(local.tensors[name]))
        leaves = _distinct(local.key, (part for name in names for part in local.leaves_of(name)))
        self._index_path = f"{directory}/{index_name}"
        self._index: bytes | None = None
        if assignment.tensors is not None:
            leaves.update(local.leaves)
            plain = {name: Logical.of_one_writer(leaf, rank) for name, leaf in local.leaves.items()}
            tensors = {**assignment.tensors, **plain}
            self._index = ShardedIndex({local.key: local.tree}, tensors, local.ties).to_bytes()
        stem = stem_of(directory, rank)
        self._files = _RankFiles(stem, rank, leaves, ties={}, states={}) if leaves else None

    @property
    def num_bytes(self) -> int:
        """Bytes that it will write."""
        return (self._files.num_bytes if self._files else 0) + len(self._index or b"")

    @property
    def num_files(self) -> int:
        """Files that it will write."""
        return (self._files.num_files if self._files else 0) + (self._index is not None)

    def write(self, staging: Staging) -> list[FileEntry]:
        """The lines of its files in the inventory, once their bytes survive a power cut.

        Raises:
            SaveError: a file could not be written.
        """
        entries = self._files.write(staging) if self._files else []
        if self._index is not None:
            with staging.create(self._index_path, writer=self._rank) as file:
                file.write([memoryview(self._index)])
                entries.append(file.finish())
        return entries


def _distinct(key: str, parts: Iterable[tuple[str, Leaf]]) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for name, leaf in parts:
        if name in leaves:
            raise UnsupportedValueError(
                f"{key}: {name}", found="also the name of a part of another tensor"
            )
        leaves[name] = leaf
    return leaves


class FilesBeside:
    """Files of a given content, written beside a component's own.

    Args:
        directory: where they go, relative to the step directory.
        rank: the rank that writes.
        files: the content of each by its name.
    """

    def __init__(self, directory: str, rank: int, files: Mapping[str, bytes]) -> None:
        self._rank = rank
        self._files = {f"{directory}/{name}": content for name, content in files.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes that it will write."""
        return sum(map(len, self._files.values()))

    @property
    def num_files(self) -> int:
        """Files that it will write."""
        return len(self._files)

    def write(self, staging: Staging) -> list[FileEntry]:
        """The lines of the files in the inventory, once their bytes survive a power cut.

        Raises:
            ConfigurationError: a name that no file in a checkpoint can have.
            SaveError: a file could not be written.
        """
        entries = []
        for path, content in self._files.items():
            with staging.create(path, writer=self._rank) as file:
                file.write([memoryview(content)])
                entries.append(file.finish())
        return entries


def _write_pieces(writer: FileWriter, pieces: Iterable[memoryview]) -> None:
    """Appends the pieces, many at a time: a checkpoint holds thousands of small ones.

    Args:
        writer: the file.
        pieces: read as they are needed, so copies among them need no more than 16 MiB at a time.
    """
    batch: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += piece.nbytes
        if num_bytes >= _BATCH_BYTES:
            writer.write(batch)
            batch, num_bytes = [], 0
    if batch:
        writer.write(batch)
