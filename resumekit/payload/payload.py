"""What one writer puts into a checkpoint directory, and how it is read back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from resumekit.errors import CorruptCheckpointError, UnsupportedValueError
from resumekit.payload.blocks import write_pieces
from resumekit.payload.decode import Decoder, names_in
from resumekit.payload.encode import Encoder
from resumekit.payload.index import Index
from resumekit.payload.layout import arrange, header
from resumekit.payload.load import read_tensors
from resumekit.storage import BLOCK_BYTES, FileEntry, Staging, StepReader
from resumekit.storage.sealed import MAX_JSON_BYTES

_NO_DIGEST = "0" * 32
_MANY_VALUES = 500_000  # far below what the parser of the index takes


class Payload:
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
        self._rank = rank
        self._stem = f"{directory}/rank-{rank:05d}"
        encoder = Encoder(prefix_names=len(states) > 1)
        self._states = {key: encoder.encode(state, where=key) for key, state in states.items()}
        stored = encoder.finish()
        self._leaves = stored.leaves
        self._ties = stored.ties
        self._records = arrange(stored.leaves)
        self._header = header(self._records, self._ties) if self._records else b""
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
        CorruptCheckpointError: damage, or a key that is not there; names the file.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    stem = f"{directory}/rank-{rank:05d}"
    data, where = f"{stem}.safetensors", f"{step.name}/{stem}"
    with step.file(f"{stem}.json") as file:
        index = Index.from_bytes(file.read(max_bytes=MAX_JSON_BYTES), where=f"{where}.json")
    wanted = list(index.states) if keys is None else list(keys)
    for key in wanted:
        if key not in index.states:
            raise CorruptCheckpointError(f"{where}.json", found=f"has no state of {key!r}")
    used = None if keys is None else set(names_in([index.states[key] for key in wanted]))
    tensors = read_tensors(lambda: step.file(data), index, where=f"{where}.safetensors", names=used)
    decoder = Decoder(tensors, where=f"{where}.json")
    return {key: decoder.decode(index.states[key]) for key in wanted}
