"""The data file of a rank and the indices beside it: what is stored, and at which offset.

A data file is a safetensors file that stock tools can read. Its header is a function of the index
and is never parsed: a reader creates it again and compares. An index is read as JSON that anybody
may have written. Its digest proves that it is undamaged; the checks here, that it is consistent:
every byte of a data file is part of exactly one tensor, and the chunks of a tensor tile it.

An index has two forms. That of one rank describes its data file, and holds the states that the rank
wrote alone. The common one of several ranks describes tensors of which they wrote chunks; tensors
that are sharded alike share one layout, so it grows with the number of different shapes and not
with ranks times tensors.

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from resumekit.errors import CorruptCheckpointError, FormatVersionError, UnsupportedValueError
from resumekit.serialization.decoding import known_element
from resumekit.serialization.encoding import MAX_SIZE, checked_shape, checked_sizes, typed
from resumekit.serialization.leaves import ElementType, Leaf, dense_strides
from resumekit.serialization.sharding import Box, Layout, Logical
from resumekit.storage.directories import parse_json

_HEADER_ALIGNMENT = 4096


class TensorRecord(NamedTuple):
    """One tensor of the data file.

    Args:
        name: its name, the FQN of a parameter.
        element: the type of its elements.
        shape: its shape.
        begin: where its bytes begin, counted from the end of the header.
        num_bytes: the length of its bytes.
        strides: its strides in memory where they are not row-major; its bytes are.
    """

    name: str
    element: ElementType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    strides: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """Where its bytes end, counted from the end of the header."""
        return self.begin + self.num_bytes


def arrange(leaves: Mapping[str, Leaf]) -> tuple[TensorRecord, ...]:
    """An offset for every leaf, one after the other without a gap.

    Large elements come first, so that each tensor is aligned to its elements; stock readers view
    the file in place and need that.
    """
    records: list[TensorRecord] = []
    begin = 0
    for name, leaf in sorted(leaves.items(), key=lambda item: -item[1].element.num_bytes):
        num_bytes = leaf.num_bytes
        records.append(TensorRecord(name, leaf.element, leaf.shape, begin, num_bytes, leaf.strides))
        begin += num_bytes
    return tuple(records)


def header(records: Iterable[TensorRecord], ties: Mapping[str, str]) -> bytes:
    """The header of the data file, its length included, padded with spaces to 4096 bytes.

    Args:
        records: the tensors, in the order of their bytes.
        ties: names without bytes of their own, with the name of the same tensor; they are noted
            where ``safetensors.torch.save_model`` notes them.
    """
    # transformers refuses a file that does not say which framework wrote it.
    metadata = json.dumps({**ties, "format": "pt"}, separators=(",", ":"))
    fields = [f'"__metadata__":{metadata}']
    for key, element, shape, begin, num_bytes, _ in records:
        # As text: a dict with lists for each takes twice as long.
        code, sizes = element.code, ",".join(map(str, shape))
        if code is None:
            code, sizes = "U8", f"{sizes}{',' * bool(shape)}{element.num_bytes}"
        name, offsets = encode_basestring_ascii(key), f"{begin},{begin + num_bytes}"
        fields.append(f'{name}:{{"dtype":"{code}","shape":[{sizes}],"data_offsets":[{offsets}]}}')
    text = f"{{{','.join(fields)}}}".encode("ascii")
    padding = -(8 + len(text)) % _HEADER_ALIGNMENT
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


class _Form(NamedTuple):
    """How an index is written: the name and the version of its format, and its fields."""

    name: str
    version: int
    fields: frozenset[str]


_OF_ONE_RANK = _Form(
    "resumekit payload", 1, frozenset({"block_digests", "ties", "tensors", "states"})
)
_COMMON = _Form("resumekit sharded payload", 2, frozenset({"ties", "layouts", "tensors", "states"}))

# Of an index of either form that has a tensor made of others.
_WITH_SUBCLASSES = 3

# Of all layouts of an index; a few characters can ask for any number.
_MAX_VALUES = 1 << 25

MIN_RECORD_BYTES = 40  # of the line of one tensor
_LINE_CHARACTERS = 100
_CHARACTERS_OF_ITEM = 3  # at least, a comma and a space included

# A line of the index for each value, and its indentation, deeper than the encoder nests values.
_LINE_BYTES = 64
# What a tensor takes in the index beyond what it takes in the header of the data file: names of
# fields, spaces, line breaks, and strides.
_TENSOR_BYTES, _DIMENSION_BYTES = 160, 32
# Per tensor: its name, four or five fields and their names, and brackets and commas around them.
_TENSOR_VALUES = 16


class IndexSize(NamedTuple):
    """Upper bounds, a few times the size where the state holds many small values.

    Args:
        num_bytes: of the text.
        num_values: strings, or brackets and commas, as the parser counts them.
    """

    num_bytes: int
    num_values: int


@dataclass(frozen=True)
class Index:
    """What one rank wrote, or what several ranks wrote together.

    Args:
        states: the tree of each state, by component key.
        records: the tensors of the rank's data file, in the order of their bytes.
        ties: names of tensors that have no bytes of their own, with the name of the same tensor.
        block_digests: of the blocks of the data file, hexadecimal.
        tensors: the whole tensors, by name.
        is_common: whether it is the index of several ranks, which has ``tensors`` and no data file.
    """

    states: Mapping[str, Any]
    records: tuple[TensorRecord, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    block_digests: tuple[str, ...] = ()
    tensors: Mapping[str, Logical] = field(default_factory=dict)
    is_common: bool = False

    def to_bytes(self) -> bytes:
        """Readable JSON, one line for each tensor.

        Raises:
            UnsupportedValueError: there are more parts than a reader accepts.
        """
        form = _COMMON if self.is_common else _OF_ONE_RANK
        fields: dict[str, Any] = {"format": form.name, "format_version": form.version}
        if self.is_common:
            layouts, rows = self._shared_layouts()
            fields |= {"ties": dict(self.ties), "layouts": layouts, "tensors": rows}
        else:
            rows = {record.name: _record_to_json(record) for record in self.records}
            fields |= {"block_digests": list(self.block_digests), "ties": dict(self.ties)}
            fields["tensors"] = rows
        fields["states"] = dict(self.states)
        text = _readable(fields)
        if "$subclass" in text and _has_subclasses(self.states):
            text = _readable({**fields, "format_version": _WITH_SUBCLASSES})
        return (text + "\n").encode("ascii")

    def _shared_layouts(self) -> tuple[list[Any], dict[str, Any]]:
        """The different layouts as JSON, and the row of each tensor with the number of its own."""
        layouts: dict[Layout, int] = {}
        known: dict[int, int] = {}  # most are the same object: with many parts, a hash is dear
        for logical in self.tensors.values():
            if id(logical.chunks) not in known:
                known[id(logical.chunks)] = layouts.setdefault(logical.chunks, len(layouts))
        num_values = sum(layout.num_values for layout in layouts)
        if num_values > _MAX_VALUES:
            raise UnsupportedValueError(
                ", ".join(self.states),
                found=f"parts with {num_values} offsets, sizes and writers in all",
                expected=f"at most {_MAX_VALUES}",
            )
        rows = {
            name: {
                "dtype": logical.element.name,
                "shape": list(logical.shape),
                "layout": known[id(logical.chunks)],
            }
            for name, logical in self.tensors.items()
        }
        return [layout.to_json() for layout in layouts], rows

    def size_at_most(self, *, header_bytes: int, num_blocks: int) -> IndexSize:
        """Its size with so many block digests, without writing it; its own ones do not count.

        Args:
            header_bytes: of the data file.
            num_blocks: of the data file.
        """
        states = json.dumps(self.states)
        structure = sum(map(states.count, "[]{},"))
        num_tensors = len(self.records)
        num_dimensions = sum(len(record.shape) for record in self.records)
        num_others = num_blocks + len(self.ties)
        return IndexSize(
            num_bytes=header_bytes
            + len(states)
            + _LINE_BYTES * (structure + num_others + 8)
            + _TENSOR_BYTES * num_tensors
            + _DIMENSION_BYTES * num_dimensions,
            num_values=max(structure, states.count('"') // 2)
            + _TENSOR_VALUES * num_tensors
            + 2 * (num_dimensions + num_others)
            + 32,
        )

    @classmethod
    def from_bytes(
        cls, data: bytes, *, where: str, is_common: bool = False, max_parts: int = _MAX_VALUES
    ) -> Index:
        """The inverse of ``to_bytes``; the parts of every tensor tile it.

        Args:
            data: the whole file.
            where: what error messages call it.
            is_common: whether it is the index of several ranks.
            max_parts: how many parts its layouts may have together.

        Raises:
            CorruptCheckpointError: says what is wrong with it.
            FormatVersionError: written by a newer version, or with a newer torch.
        """
        try:
            fields = _parse(data, where, _COMMON if is_common else _OF_ONE_RANK)
            states, ties = typed(dict, fields["states"]), _ties(fields["ties"])
            version = fields["format_version"]
            if version < _WITH_SUBCLASSES and b"$subclass" in data and _has_subclasses(states):
                raise ValueError(f"a $subclass in version {version}")
            rows = typed(dict, fields["tensors"])
            if is_common:
                layouts = _layouts(typed(list, fields["layouts"]), version, max_parts)
                tensors = _tensors(rows, layouts, where)
                return cls(states, ties=ties, tensors=tensors, is_common=True)
            block_digests = typed(list, fields["block_digests"])
            return cls(
                states,
                _records(rows, where),
                ties,
                tuple(typed(str, each) for each in block_digests),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(where, found=f"not an index: {error}") from error


def stem_of(directory: str, rank: int, *, is_frozen: bool = False) -> str:
    """The path of a rank's files in a directory, without their suffix.

    Args:
        directory: relative to the step directory.
        rank: the rank that writes them.
        is_frozen: whether they hold its frozen tensors.
    """
    return f"{directory}/rank-{rank:05d}" + (".frozen" if is_frozen else "")


def index_name(first_rank: int, is_in_stages: bool) -> str:
    """The file name of the common index of one group.

    Args:
        first_rank: of the group; it writes the index.
        is_in_stages: whether other groups hold other entries of the state.
    """
    return f"index-{first_rank:05d}.json" if is_in_stages else "index.json"


def _parse(data: bytes, where: str, form: _Form) -> dict[str, Any]:
    """The fields of an index of this form and a known version."""
    fields = parse_json(data, where=where)
    if not isinstance(fields, dict) or fields.get("format") != form.name:
        raise ValueError(f"its format is not {form.name!r}")
    version = fields["format_version"]
    if type(version) is not int or version < 1:
        raise ValueError(f"the format version {str(version)[:80]!r}")
    if version > _WITH_SUBCLASSES:
        raise FormatVersionError(
            where,
            found=f"format version {version}",
            expected=f"at most {_WITH_SUBCLASSES}",
            remedy="Install a newer resumekit",
        )
    if set(fields) != {"format", "format_version", *form.fields}:
        named = str(sorted(set(fields) ^ form.fields))[:200]
        raise ValueError(f"unknown or missing fields: {named}")
    return fields


def _has_subclasses(states: Mapping[str, Any]) -> bool:
    # Of a text in the states the quotes would be escaped, and a key of the user's is in a list.
    return '{"$subclass": [' in json.dumps(states)


def _record_to_json(record: TensorRecord) -> dict[str, Any]:
    row = {
        "dtype": record.element.name,
        "shape": list(record.shape),
        "begin": record.begin,
        "end": record.end,
    }
    return row if record.strides is None else {**row, "strides": list(record.strides)}


def _records(rows: dict[str, Any], where: str) -> tuple[TensorRecord, ...]:
    records: list[TensorRecord] = []
    reached = 0
    for name, row in rows.items():
        record = _record(name, typed(dict, row), where)
        if record.begin != reached or record.end != typed(int, row["end"]):
            raise ValueError(
                f"{name[:200]!r} of {record.num_bytes} bytes is at {record.begin} to "
                f"{str(row['end'])[:80]}, after {reached}"
            )
        reached = record.end
        records.append(record)
    return tuple(records)


def _record(name: str, row: dict[str, Any], where: str) -> TensorRecord:
    if set(row) - {"strides"} != {"dtype", "shape", "begin", "end"}:
        raise ValueError(f"{name[:200]!r} has the fields {str(sorted(row))[:200]}")
    begin, shape = typed(int, row["begin"]), checked_shape(row["shape"])
    strides = checked_sizes(row["strides"]) if "strides" in row else None
    if strides is not None and not _is_dense(shape, strides):
        raise ValueError(f"{name[:200]!r} has the strides {strides} and the shape {shape}")
    element = known_element(row["dtype"], where=where)
    num_bytes = math.prod(shape) * element.num_bytes
    return TensorRecord(name, element, shape, begin, num_bytes, strides)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these are the strides of a row-major tensor with its dimensions reordered."""
    if len(shape) != len(strides):
        return False
    order = sorted((step, size) for size, step in zip(shape, strides, strict=True) if size != 1)
    sizes = tuple(size for _, size in reversed(order))
    return dense_strides(sizes) == tuple(step for step, _ in reversed(order))


def _ties(ties: Any) -> dict[str, str]:
    return {name: typed(str, other) for name, other in typed(dict, ties).items()}


# How json.dumps writes them; most values of an index are of these types.
_SCALARS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring_ascii,
    int: int.__repr__,
    float: float.__repr__,
}


def _readable(value: Any, indent: int = 0) -> str:
    """JSON in which whatever fits into a line stands on one."""
    is_dict = isinstance(value, dict)
    if not (is_dict or isinstance(value, list)):
        return _SCALARS.get(type(value), json.dumps)(value)
    below = indent + 1
    if is_dict:
        parts = [
            f"{encode_basestring_ascii(key)}: {_readable(item, below)}"
            for key, item in value.items()
        ]
    else:
        parts = [_readable(item, below) for item in value]
    begin, end = "{}" if is_dict else "[]"
    if _CHARACTERS_OF_ITEM * len(parts) <= _LINE_CHARACTERS:
        text = f"{begin}{', '.join(parts)}{end}"
        if len(text) + indent <= _LINE_CHARACTERS and "\n" not in text:
            return text
    inner = " " * below
    lines = ",\n".join([inner + part for part in parts]) if is_dict else _filled(parts, inner)
    return f"{begin}\n{lines}\n{' ' * indent}{end}"


def _filled(parts: list[str], inner: str) -> str:
    """Short items fill the lines (a generator's 625 words), long ones get a line each."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= _LINE_CHARACTERS and "\n" not in part:
            lines[-1] += f", {part}"
        else:
            lines.append(inner + part)
    return ",\n".join(lines)


def _layouts(rows: list[Any], version: int, max_parts: int) -> list[Layout]:
    layouts: list[Layout] = []
    num_values = num_parts = 0
    for row in rows:
        if version == 1:
            layouts.append(_listed_layout(row))
            continue
        limits = {"max_values": _MAX_VALUES - num_values, "max_parts": max_parts - num_parts}
        layouts.append(Layout.from_json(row, **limits))
        num_values += layouts[-1].num_values
        num_parts += len(layouts[-1])
    return layouts


def _listed_layout(rows: Any) -> Layout:
    """A layout of version 1, which lists every part as ``[writer, offsets, sizes]``."""
    parts = []
    for row in typed(list, rows):
        writer, offsets, sizes = typed(list, row)
        if not 0 <= typed(int, writer) <= MAX_SIZE:
            raise ValueError(f"the writer {str(writer)[:80]}")
        parts.append((writer, Box(checked_shape(offsets), checked_shape(sizes))))
    return Layout.of_chunks(parts)


def _tensors(rows: dict[str, Any], layouts: list[Layout], where: str) -> dict[str, Logical]:
    tiled: set[tuple[int, tuple[int, ...]]] = set()
    tensors: dict[str, Logical] = {}
    for name, row in rows.items():
        if set(typed(dict, row)) != {"dtype", "shape", "layout"}:
            raise ValueError(f"{name[:200]!r} has the fields {str(sorted(row))[:200]}")
        number, shape = row["layout"], checked_shape(row["shape"])
        if not 0 <= typed(int, number) < len(layouts):
            raise ValueError(f"{name[:200]!r} has the layout {str(number)[:80]}")
        if (number, shape) not in tiled:
            problem = layouts[number].tiling_problem(shape)
            if problem is not None:
                raise ValueError(f"{name[:200]!r}: {problem}")
            tiled.add((number, shape))
        tensors[name] = Logical(known_element(row["dtype"], where=where), shape, layouts[number])
    return tensors
