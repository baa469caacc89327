"""How large the index of a data file will be, without writing it."""

from __future__ import annotations

import json
from typing import NamedTuple

from resumekit.serialization.index import Index

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

    @classmethod
    def at_most(cls, index: Index, *, header_bytes: int, num_blocks: int) -> IndexSize:
        """The size of an index with so many block digests.

        Args:
            index: what it holds; its own block digests do not count.
            header_bytes: of the data file.
            num_blocks: of the data file.
        """
        states = json.dumps(index.states)
        structure = sum(map(states.count, "[]{},"))
        num_tensors = len(index.records)
        num_dimensions = sum(len(record.shape) for record in index.records)
        num_others = num_blocks + len(index.ties)
        return cls(
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
