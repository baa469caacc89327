"""Where each leaf stands in the data file: a safetensors file that stock tools can read.

The header is a function of the index and is never parsed: a reader makes it again and compares.

Source: the safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resumekit.serialization.dtypes import ElementType
from resumekit.serialization.leaves import Leaf

_HEADER_ALIGNMENT = 4096


@dataclass(frozen=True)
class Record:
    """One tensor of the data file.

    Args:
        name: its name, the FQN of a parameter.
        element: the type of its elements.
        shape: its shape.
        begin: where its bytes begin, counted from the end of the header.
        strides: its strides in memory where they are not row-major; its bytes are.
    """

    name: str
    element: ElementType
    shape: tuple[int, ...]
    begin: int
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """The length of its bytes."""
        return math.prod(self.shape) * self.element.num_bytes

    @property
    def end(self) -> int:
        """Where its bytes end, counted from the end of the header."""
        return self.begin + self.num_bytes


def arrange(leaves: Mapping[str, Leaf]) -> tuple[Record, ...]:
    """A place for every leaf, one after the other without a gap.

    Large elements come first, so that each tensor is aligned to its elements; stock readers view
    the file in place and need that.
    """
    records: list[Record] = []
    begin = 0
    for name, leaf in sorted(leaves.items(), key=lambda item: -item[1].element.num_bytes):
        records.append(Record(name, leaf.element, leaf.shape, begin, leaf.strides))
        begin = records[-1].end
    return tuple(records)


def header(records: Iterable[Record], ties: Mapping[str, str]) -> bytes:
    """The header of the data file, its length included, padded with spaces to 4096 bytes.

    Args:
        records: the tensors, in the order of their bytes.
        ties: names without bytes of their own, with the name of the same tensor; they are noted
            where ``safetensors.torch.save_model`` notes them.
    """
    # transformers refuses a file that does not say which framework wrote it.
    fields: dict[str, object] = {"__metadata__": {**ties, "format": "pt"}}
    for record in records:
        code, shape = record.element.code, list(record.shape)
        if code is None:
            code, shape = "U8", [*shape, record.element.num_bytes]
        fields[record.name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [record.begin, record.end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    padding = -(8 + len(text)) % _HEADER_ALIGNMENT
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding
