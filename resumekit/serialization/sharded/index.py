"""The index of state that several ranks wrote: what it is, and where the parts of each tensor are.

Tensors that are spread alike (every layer has the same shapes) share one list of parts, so the file
grows with the number of different shapes and not with ranks times tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resumekit.errors import CorruptCheckpointError, FormatVersionError
from resumekit.serialization.decode import known_element
from resumekit.serialization.dtypes import ElementType
from resumekit.serialization.index import Index, as_dict, readable, strings
from resumekit.serialization.limits import checked_shape
from resumekit.serialization.sharded.cover import tiling_problem
from resumekit.serialization.sharding import Box
from resumekit.storage import parse_json

FORMAT = "resumekit sharded payload"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Chunk:
    """A stored part of a tensor; it stands in its writer's data file under ``part_name``.

    Args:
        writer: the rank that wrote it.
        box: which part it is.
        number: of this part among its writer's parts of the tensor, in the order of the list.
    """

    writer: int
    box: Box
    number: int = 0


def part_name(name: str, number: int) -> str:
    """What a part of a tensor is called in its writer's data file."""
    return f"{name}#{number + 1}" if number else name


@dataclass(frozen=True)
class Logical:
    """A whole tensor, as the ranks hold it together.

    Args:
        element: the type of its elements.
        shape: its whole shape.
        chunks: its parts; none where it has no elements.
    """

    element: ElementType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ShardedIndex:
    """What the ranks wrote together.

    Args:
        states: the tree of each state, by component key.
        tensors: the whole tensors, by name.
        ties: names of tensors that are the same tensor as another name.
    """

    states: Mapping[str, Any]
    tensors: Mapping[str, Logical]
    ties: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Readable JSON, one line for each tensor."""
        layouts: dict[tuple[Chunk, ...], int] = {}
        known: dict[int, int] = {}  # most are the same object: with many parts, a hash is dear
        for logical in self.tensors.values():
            if id(logical.chunks) not in known:
                known[id(logical.chunks)] = layouts.setdefault(logical.chunks, len(layouts))
        rows = {
            name: {
                "dtype": logical.element.name,
                "shape": list(logical.shape),
                "layout": known[id(logical.chunks)],
            }
            for name, logical in self.tensors.items()
        }
        fields = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "ties": dict(self.ties),
            "layouts": [[_chunk_to_json(chunk) for chunk in chunks] for chunks in layouts],
            "tensors": rows,
            "states": dict(self.states),
        }
        return (readable(fields) + "\n").encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> ShardedIndex:
        """The inverse of ``to_bytes``; the parts of every tensor tile it.

        Raises:
            CorruptCheckpointError: says what is wrong with it.
            FormatVersionError: written by a newer version, or with a newer torch.
        """
        fields = parse_json(data, where=where)
        try:
            _check_format(fields, where)
            layouts = _layouts(fields["layouts"])
            return cls(
                states=as_dict(fields["states"]),
                tensors=_tensors(as_dict(fields["tensors"]), layouts, where),
                ties=dict(
                    zip(
                        fields["ties"], strings(list(as_dict(fields["ties"]).values())), strict=True
                    )
                ),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(where, found=f"not an index: {error}") from error

    @classmethod
    def of_one_writer(cls, index: Index, writer: int) -> ShardedIndex:
        """The same view of state that one rank wrote whole."""
        tensors = {
            record.name: Logical(
                record.element,
                record.shape,
                (Chunk(writer, Box.whole(record.shape)),) if record.num_bytes else (),
            )
            for record in index.records
        }
        return cls(index.states, tensors, index.ties)


def _chunk_to_json(chunk: Chunk) -> list[Any]:
    return [chunk.writer, list(chunk.box.offsets), list(chunk.box.sizes)]


def _check_format(fields: Any, where: str) -> None:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f"it does not say that it is a {FORMAT!r}")
    version = fields["format_version"]
    if type(version) is not int or version < 1:
        raise ValueError(f"the format version {str(version)[:80]!r}")
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            where,
            found=f"format version {version}",
            expected=f"at most {FORMAT_VERSION}",
            remedy="Install a newer resumekit",
        )
    expected = {"format", "format_version", "ties", "layouts", "tensors", "states"}
    if set(fields) != expected:
        raise ValueError(f"unknown or missing fields: {str(sorted(set(fields) ^ expected))[:200]}")


def _layouts(rows: Any) -> list[tuple[Chunk, ...]]:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError("layouts that are not lists of parts")
    return [_chunks(row) for row in rows]


def _chunks(rows: list[Any]) -> tuple[Chunk, ...]:
    num_parts: Counter[int] = Counter()
    chunks = []
    for writer, box in map(_part, rows):
        chunks.append(Chunk(writer, box, num_parts[writer]))
        num_parts[writer] += 1
    return tuple(chunks)


def _part(row: Any) -> tuple[int, Box]:
    if not isinstance(row, list) or len(row) != 3:
        raise ValueError(f"the part {str(row)[:80]!r}")
    writer, offsets, sizes = row
    if type(writer) is not int or writer < 0:
        raise ValueError(f"the writer {str(writer)[:80]!r}")
    return writer, Box(checked_shape(offsets), checked_shape(sizes))


def _tensors(
    rows: dict[str, Any], layouts: list[tuple[Chunk, ...]], where: str
) -> dict[str, Logical]:
    tiled: set[tuple[int, tuple[int, ...]]] = set()
    tensors: dict[str, Logical] = {}
    for name, row in rows.items():
        if set(as_dict(row)) != {"dtype", "shape", "layout"}:
            raise ValueError(f"{name[:200]!r} has the fields {str(sorted(row))[:200]}")
        number, shape = row["layout"], checked_shape(row["shape"])
        if type(number) is not int or not 0 <= number < len(layouts):
            raise ValueError(f"{name[:200]!r} has the layout {str(number)[:80]!r}")
        if (number, shape) not in tiled:
            problem = tiling_problem(shape, (chunk.box for chunk in layouts[number]))
            if problem is not None:
                raise ValueError(f"{name[:200]!r}: {problem}")
            tiled.add((number, shape))
        tensors[name] = Logical(known_element(row["dtype"], where=where), shape, layouts[number])
    return tensors
