"""What a rank reads of which stored part, as torch.distributed.checkpoint plans it.

It is imported where it is needed, because it takes a second to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from resumekit.serialization.sharded.index import Chunk, Logical
from resumekit.serialization.sharding import Box


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

    asked, alike = _different(tensors, wanted)
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
    return [
        _fetch(name, item, tensors[name].chunks)
        for item in plan.items
        for name in alike[item.dest_index.fqn]
    ]


def _different(
    tensors: Mapping[str, Logical], wanted: Mapping[str, Box]
) -> tuple[dict[str, Box], dict[str, list[str]]]:
    """One tensor of those of which the same is wanted; and by its name, the names of them all.

    torch looks at every part of every tensor, and most tensors are spread like another.
    """
    asked: dict[str, Box] = {}
    alike: dict[str, list[str]] = {}
    first: dict[Any, str] = {}
    for name, box in wanted.items():
        if box.num_elements:
            logical = tensors[name]
            # Those that the index gives one layout have one list of parts, the same object.
            same = first.setdefault((id(logical.chunks), logical.shape, box), name)
            asked.setdefault(same, box)
            alike.setdefault(same, []).append(name)
    return asked, alike


def _fetch(name: str, item: Any, chunks: Sequence[Chunk]) -> Fetch:
    lengths = tuple(item.lengths)
    return Fetch(
        name,
        chunks[item.storage_index.index],
        Box(tuple(item.storage_offsets), lengths),
        Box(tuple(item.dest_offsets), lengths),
    )
