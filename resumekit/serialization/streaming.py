"""The tensors of a stored state, read box by box: a caller needs no memory for whole tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from resumekit.serialization.data_files import DataFiles
from resumekit.serialization.dtypes import ElementType
from resumekit.serialization.layouts import Fetch, Logical, part_name, plan_fetches
from resumekit.serialization.leaves import PLAIN_TYPES
from resumekit.serialization.reading import Merge, Source
from resumekit.serialization.sharding import Box


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A whole tensor of a checkpoint, whichever ranks wrote its parts.

    Args:
        name: in its index.
        meta: what stands for it in the state.
        logical: its type, shape and parts.
        files: the data files of their writers.
    """

    name: str
    meta: Tensor
    logical: Logical
    files: DataFiles

    @property
    def element(self) -> ElementType:
        """The type of its elements."""
        return self.logical.element

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        return self.logical.shape

    @property
    def num_bytes(self) -> int:
        """The length of all its parts."""
        return math.prod(self.shape) * self.element.num_bytes

    def has_digests_of(self, other: StoredTensor) -> bool:
        """Whether the digests of the blocks that hold it prove that both have the same bytes.

        Nothing is read for it but the indices. False says nothing: the layouts may differ.

        Raises:
            CheckpointError: damage, or an I/O error.
        """
        mine, theirs = self.logical.chunks, other.logical.chunks
        if len(mine) != len(theirs) or self.shape != other.shape or self.element != other.element:
            return False
        return all(
            first == second for first, second in zip(self._digests(), other._digests(), strict=True)
        )

    def _digests(self) -> Iterator[tuple[Any, ...]]:
        for chunk in self.logical.chunks:
            files = self.files[chunk.writer]
            yield chunk.box, *files.block_digests(part_name(self.name, chunk.number))


@dataclass(frozen=True)
class StoredState:
    """A state of a checkpoint whose tensors have not been read.

    Args:
        state: with its tensors on the meta device. Of those that share memory with another one,
            the values are there.
        tensors: the stored tensor of each, by the id of the one on the meta device.
    """

    state: Any
    tensors: Mapping[int, StoredTensor]


def open_state(source: Source, merge: Merge) -> StoredState:
    """The state of a component as all its writers stored it; tensors are not read.

    Args:
        source: its files.
        merge: makes one state of those of all groups.

    Raises:
        CheckpointError: damage of an index, or an I/O error.
    """
    views = source.views()
    tensors = {
        id(meta): StoredTensor(name, meta, view.index.tensors[name], view.files)
        for view in views
        for name, meta in view.meta_tensors.items()
    }
    return StoredState(merge([view.state() for view in views]), tensors)


def read_boxes(wanted: Sequence[tuple[StoredTensor, Box]]) -> list[Tensor]:
    """Boxes of tensors as plain numbers, verified; a file's blocks are read once for all of them.

    Args:
        wanted: one box of each tensor.

    Raises:
        CheckpointError: damage, or an I/O error.
    """
    memories = [
        torch.empty(box.sizes, dtype=PLAIN_TYPES[tensor.element.num_bytes], device="cpu")
        for tensor, box in wanted
    ]
    of_files: dict[int, list[int]] = {}
    for number, (tensor, _) in enumerate(wanted):
        of_files.setdefault(id(tensor.files), []).append(number)
    for numbers in of_files.values():
        tensors = {wanted[number][0].name: wanted[number][0].logical for number in numbers}
        boxes = {wanted[number][0].name: wanted[number][1] for number in numbers}
        targets = {wanted[number][0].name: memories[number] for number in numbers}
        _fill(wanted[numbers[0]][0].files, tensors, boxes, targets)
    return memories


def _fill(
    files: DataFiles,
    tensors: Mapping[str, Logical],
    boxes: Mapping[str, Box],
    targets: Mapping[str, Tensor],
) -> None:
    fetches: dict[int, list[Fetch]] = {}
    for fetch in plan_fetches(tensors, boxes):
        fetches.setdefault(fetch.chunk.writer, []).append(fetch)
    for writer in sorted(fetches):
        for file, its_fetches in files[writer].divide(fetches[writer]):
            if its_fetches:
                file.require(its_fetches, tensors)
                parts = (file.parts(each, targets[each.name]) for each in its_fetches)
                file.read(list(chain.from_iterable(parts)), check_header=False)
