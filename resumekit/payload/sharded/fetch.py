"""What a rank reads of which stored part, as torch.distributed.checkpoint plans it.

It is imported where it is needed, because it takes a second to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from resumekit.payload.sharded.index import Chunk, Logical
from resumekit.sharding import Box


class Target:
    """What torch's load planner asks of a tensor: its whole size, and the part wanted here."""

    def __init__(self, shape: tuple[int, ...], box: Box) -> None:
        self._shape = shape
        self._box = box

    def size(self) -> torch.Size:
        """The size of the whole tensor."""
        return torch.Size(self._shape)

    def __create_chunk_list__(self) -> list[Any]:
        # torch 2.13 distributed/checkpoint/planner_helpers.py, _create_chunk_list asks for it.
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(
                offsets=torch.Size(self._box.offsets), sizes=torch.Size(self._box.sizes)
            )
        ]


@dataclass(frozen=True)
class Fetch:
    """A box to be copied out of one stored part.

    Args:
        name: of the tensor.
        chunk: the stored part.
        stored: where the box lies in that part.
        wanted: where it lies in the part wanted.
    """

    name: str
    chunk: Chunk
    stored: Box
    wanted: Box


def plan_fetches(tensors: Mapping[str, Logical], wanted: Mapping[str, Box]) -> list[Fetch]:
    """What is to be read so that the wanted parts are there.

    Args:
        tensors: where the parts of each tensor are.
        wanted: the part wanted of each, by name.
    """
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    asked = {name: box for name, box in wanted.items() if box.num_elements}
    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(),
                size=torch.Size(tensors[name].shape),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size(chunk.box.offsets), sizes=torch.Size(chunk.box.sizes)
                    )
                    for chunk in tensors[name].chunks
                ],
            )
            for name in asked
        }
    )
    targets = {name: Target(tensors[name].shape, box) for name, box in asked.items()}
    plan = create_default_local_load_plan(targets, metadata, strict=True)
    return [_fetch(item, tensors) for item in plan.items]


def _fetch(item: Any, tensors: Mapping[str, Logical]) -> Fetch:
    name, lengths = item.dest_index.fqn, tuple(item.lengths)
    return Fetch(
        name,
        tensors[name].chunks[item.storage_index.index],
        Box(tuple(item.storage_offsets), lengths),
        Box(tuple(item.dest_offsets), lengths),
    )
