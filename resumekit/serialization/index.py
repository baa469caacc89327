"""The index beside a data file: what the states are, and where their tensors stand.

It is read as JSON that anybody may have written. Its digest says that it is undamaged, the checks
here say that it makes sense: every byte of the data file belongs to exactly one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resumekit.errors import CorruptCheckpointError, FormatVersionError
from resumekit.serialization.decode import known_element
from resumekit.serialization.layout import Record
from resumekit.serialization.leaves import dense_strides
from resumekit.serialization.limits import checked_shape, checked_sizes
from resumekit.storage import parse_json

FORMAT = "resumekit payload"
FORMAT_VERSION = 1

_LINE_CHARACTERS = 100


@dataclass(frozen=True)
class Index:
    """What one writer's part of a payload holds.

    Args:
        states: the tree of each state, by component key.
        records: the tensors of the data file, in the order of their bytes.
        ties: names of tensors that have no bytes of their own, with the name of the same tensor.
        block_digests: of the blocks of the data file, hexadecimal.
    """

    states: Mapping[str, Any]
    records: tuple[Record, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    block_digests: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Readable JSON, one line for each tensor."""
        fields = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "block_digests": list(self.block_digests),
            "ties": dict(self.ties),
            "tensors": {record.name: _record_to_json(record) for record in self.records},
            "states": dict(self.states),
        }
        return (readable(fields) + "\n").encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Index:
        """The inverse of ``to_bytes``.

        Raises:
            CorruptCheckpointError: says what is wrong with it.
            FormatVersionError: written by a newer version, or with a newer torch.
        """
        fields = parse_json(data, where=where)
        try:
            _check_format(fields, where)
            return cls(
                states=as_dict(fields["states"]),
                records=_records(as_dict(fields["tensors"]), where),
                ties=_ties(as_dict(fields["ties"])),
                block_digests=strings(fields["block_digests"]),
            )
        except (ValueError, KeyError) as error:
            raise CorruptCheckpointError(where, found=f"not an index: {error}") from error


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
    expected = {"format", "format_version", "block_digests", "ties", "tensors", "states"}
    if set(fields) != expected:
        raise ValueError(f"unknown or missing fields: {str(sorted(set(fields) ^ expected))[:200]}")


def _record_to_json(record: Record) -> dict[str, Any]:
    row = {
        "dtype": record.element.name,
        "shape": list(record.shape),
        "begin": record.begin,
        "end": record.end,
    }
    return row if record.strides is None else {**row, "strides": list(record.strides)}


def _records(rows: dict[str, Any], where: str) -> tuple[Record, ...]:
    records: list[Record] = []
    reached = 0
    for name, row in rows.items():
        record = _record(name, as_dict(row), where)
        if record.begin != reached or record.end != row["end"]:
            raise ValueError(
                f"{name[:200]!r} of {record.num_bytes} bytes is at {record.begin} to "
                f"{str(row['end'])[:80]}, after {reached}"
            )
        reached = record.end
        records.append(record)
    return tuple(records)


def _record(name: str, row: dict[str, Any], where: str) -> Record:
    if set(row) - {"strides"} != {"dtype", "shape", "begin", "end"}:
        raise ValueError(f"{name[:200]!r} has the fields {str(sorted(row))[:200]}")
    if type(row["begin"]) is not int or type(row["end"]) is not int:
        raise ValueError(f"{name[:200]!r} has no place in the file")
    shape = checked_shape(row["shape"])
    strides = checked_sizes(row["strides"]) if "strides" in row else None
    if strides is not None and not _is_dense(shape, strides):
        raise ValueError(f"{name[:200]!r} has the strides {strides} and the shape {shape}")
    return Record(name, known_element(row["dtype"], where=where), shape, row["begin"], strides)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these are the strides of a row-major tensor with its dimensions reordered."""
    if len(shape) != len(strides):
        return False
    order = sorted((step, size) for size, step in zip(shape, strides, strict=True) if size != 1)
    sizes = tuple(size for _, size in reversed(order))
    return dense_strides(sizes) == tuple(step for step, _ in reversed(order))


def _ties(ties: dict[str, Any]) -> dict[str, str]:
    return dict(zip(ties, strings(list(ties.values())), strict=True))


def strings(values: Any) -> tuple[str, ...]:
    """A list of strings, or ValueError."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{str(values)[:80]} instead of strings")
    return tuple(values)


def as_dict(value: Any) -> dict[str, Any]:
    """An object, or ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:80]!r} instead of an object")
    return value


def readable(value: Any, indent: int = 0) -> str:
    """JSON in which whatever fits into a line stands on one."""
    text = json.dumps(value)
    if len(text) + indent <= _LINE_CHARACTERS or not isinstance(value, dict | list):
        return text
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {readable(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{' ' * indent}}}"
    parts = [readable(item, indent + 1) for item in value]
    return "[\n" + _filled(parts, inner) + f"\n{' ' * indent}]"


def _filled(parts: list[str], inner: str) -> str:
    """Short items fill the lines (a generator's 625 words), long ones get a line each."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= _LINE_CHARACTERS and "\n" not in part:
            lines[-1] += f", {part}"
        else:
            lines.append(inner + part)
    return ",\n".join(lines)
