"""What one rank writes of a component whose tensors are spread."""

from __future__ import annotations

from collections.abc import Iterable

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.leaves import Leaf
from resumekit.serialization.part import Part
from resumekit.serialization.payload import stem_of
from resumekit.serialization.sharded.encode import LocalState
from resumekit.serialization.sharded.index import Chunk, Logical, ShardedIndex
from resumekit.serialization.sharded.plan import Assignment
from resumekit.serialization.sharding import Box, is_sharded
from resumekit.storage import FileEntry, Staging


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
            plain = {
                name: Logical(
                    leaf.element,
                    leaf.shape,
                    (Chunk(rank, Box.whole(leaf.shape)),) if leaf.num_bytes else (),
                )
                for name, leaf in local.leaves.items()
            }
            tensors = {**assignment.tensors, **plain}
            self._index = ShardedIndex({local.key: local.tree}, tensors, local.ties).to_bytes()
        stem = stem_of(directory, rank)
        self._part = Part(stem, rank, leaves, ties={}, states={}) if leaves else None

    @property
    def num_bytes(self) -> int:
        """Bytes that it will write."""
        return (self._part.num_bytes if self._part else 0) + len(self._index or b"")

    @property
    def num_files(self) -> int:
        """Files that it will write."""
        return (self._part.num_files if self._part else 0) + (self._index is not None)

    def write(self, staging: Staging) -> list[FileEntry]:
        """The lines of its files in the inventory, once their bytes survive a power cut.

        Raises:
            SaveError: a file could not be written.
        """
        entries = self._part.write(staging) if self._part else []
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
