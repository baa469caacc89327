"""Compares the tensors of two checkpoints block by block, in bounded memory.

Blocks are boxes of whole tensors, by global offset: how either side was sharded does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resumekit.diff.elements import are_comparable, compare_elements
from resumekit.diff.result import ElementDifferences, TensorDifference
from resumekit.serialization import (
    Box,
    ElementType,
    StoredTensor,
    element_type,
    read_boxes,
)

BATCH_BYTES = 32 << 20  # of each side


@dataclass(frozen=True)
class TensorPair:
    """Two tensors under one name.

    Args:
        name: in both checkpoints.
        tensors: stored ones that have not been read, or, of shared memory, their values.
    """

    name: str
    tensors: tuple[StoredTensor | Tensor, StoredTensor | Tensor]

    @property
    def elements(self) -> tuple[ElementType, ElementType]:
        """The types of both."""
        first, second = (element_of(each) for each in self.tensors)
        return first, second

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of both."""
        first, second = (tuple(each.shape) for each in self.tensors)
        return first, second


def element_of(tensor: StoredTensor | Tensor) -> ElementType:
    """The type of the elements of a tensor."""
    if isinstance(tensor, StoredTensor):
        return tensor.element
    element = element_type(tensor.dtype)
    assert element is not None, "it was stored"
    return element


def compare_tensors(pairs: Sequence[TensorPair]) -> list[TensorDifference]:
    """The pairs that differ, the largest difference first.

    Raises:
        CheckpointError: damage, or an I/O error while reading.
    """
    totals: dict[int, ElementDifferences] = {}
    for numbers, boxes in _batches(pairs):
        blocks = zip(*(_read(pairs, numbers, boxes, side) for side in (0, 1)), strict=True)
        for number, (first, second) in zip(numbers, blocks, strict=True):
            found = compare_elements(first, second, pairs[number].elements)
            totals[number] = totals.get(number, ElementDifferences()).joined(found)
    differences = (_difference(pair, totals.get(number)) for number, pair in enumerate(pairs))
    return sorted(filter(None, differences), key=lambda each: -each.size)


def _difference(pair: TensorPair, elements: ElementDifferences | None) -> TensorDifference | None:
    (first, second), shapes = pair.elements, pair.shapes
    if first == second and shapes[0] == shapes[1] and not (elements and elements.num_different):
        return None
    return TensorDifference(pair.name, (first.name, second.name), shapes, elements)


def _batches(pairs: Sequence[TensorPair]) -> Iterator[tuple[list[int], list[Box]]]:
    """What is read together: boxes of several small tensors, or one of a large tensor."""
    numbers: list[int] = []
    boxes: list[Box] = []
    num_bytes = 0
    used: set[int] = set()  # a tensor with two names is there twice
    for number, pair in enumerate(pairs):
        if not _is_to_read(pair):
            continue
        width = max(element.num_bytes for element in pair.elements)
        for box in boxes_of_shape(pair.shapes[0], BATCH_BYTES // width):
            needed = box.num_elements * width
            ids = {id(tensor) for tensor in pair.tensors}
            if numbers and (num_bytes + needed > BATCH_BYTES or ids & used):
                yield numbers, boxes
                numbers, boxes, num_bytes, used = [], [], 0, set()
            used |= ids
            numbers.append(number)
            boxes.append(box)
            num_bytes += needed
    if numbers:
        yield numbers, boxes


def _is_to_read(pair: TensorPair) -> bool:
    """Whether the elements can be compared, and no digests prove that they are equal."""
    first, second = pair.tensors
    if pair.shapes[0] != pair.shapes[1] or not are_comparable(*pair.elements):
        return False
    if isinstance(first, StoredTensor) and isinstance(second, StoredTensor):
        return not first.has_digests_of(second)
    return True


def boxes_of_shape(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Boxes that tile a tensor, each of consecutive elements in row-major order.

    Args:
        shape: of the tensor; without elements it has no box.
        max_elements: of a box.
    """
    if not math.prod(shape):
        return
    if math.prod(shape) <= max_elements:
        yield Box.whole(shape)
        return
    num_rows, inner = max_elements // math.prod(shape[1:]), shape[1:]
    for begin in range(0, shape[0], max(num_rows, 1)):
        if num_rows:
            rows = min(num_rows, shape[0] - begin)
            yield Box((begin, *(0,) * len(inner)), (rows, *inner))
        else:
            for box in boxes_of_shape(inner, max_elements):
                yield Box((begin, *box.offsets), (1, *box.sizes))


def _read(
    pairs: Sequence[TensorPair], numbers: Sequence[int], boxes: Sequence[Box], side: int
) -> list[NDArray[np.uint8]]:
    """The bytes of one side of a batch."""
    tensors = [pairs[number].tensors[side] for number in numbers]
    stored = [
        (tensor, box)
        for tensor, box in zip(tensors, boxes, strict=True)
        if isinstance(tensor, StoredTensor)
    ]
    read = iter(read_boxes(stored))
    return [
        _bytes(next(read) if isinstance(tensor, StoredTensor) else tensor[box.slices].contiguous())
        for tensor, box in zip(tensors, boxes, strict=True)
    ]


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat
