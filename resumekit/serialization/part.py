"""A data file and the index beside it, as one rank writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from resumekit.errors import CorruptCheckpointError, UnsupportedValueError
from resumekit.serialization.blocks import write_pieces
from resumekit.serialization.index import Index
from resumekit.serialization.layout import arrange, header
from resumekit.serialization.leaves import Leaf
from resumekit.storage import BLOCK_BYTES, MAX_JSON_BYTES, FileEntry, Staging

_NO_DIGEST = "0" * 32
_MANY_VALUES = 500_000  # far below what the parser of the index takes


class Part:
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
                write_pieces(data, self._pieces())
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
