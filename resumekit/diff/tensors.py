"""Compares the tensors of two checkpoints block by block, in bounded memory.

Blocks are boxes of whole tensors, by global offset: how either side was sharded does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resumekit.diff.result import ElementDifferences, TensorDifference
from resumekit.serialization.leaves import ElementType, element_type
from resumekit.serialization.reading import StoredTensor, read_boxes
from resumekit.serialization.sharding import Box

_Array = NDArray[Any]

_MAX_ELEMENTS = 1 << 18  # at once: what is computed of each needs many times its memory

# A complex number is compared as two real ones.
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_UNSIGNED: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED: dict[int, type[Any]] = {1: np.uint8, 2: np.int16}  # those that every torch can view
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"bool"}
_NUMPY_FLOATS = {"float16", "float32", "float64"}
_OTHER_FLOATS = {
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
}
_WITHOUT_SIGN = "float8_e8m0fnu"
_FLOATS = _NUMPY_FLOATS | _OTHER_FLOATS


def are_comparable(first: ElementType, second: ElementType) -> bool:
    """Whether elements of two types can be compared: equal types, or floats of two widths."""
    return first == second or {first.name, second.name} <= _FLOATS


def compare_elements(
    first: _Array, second: _Array, types: tuple[ElementType, ElementType]
) -> ElementDifferences:
    """How the elements of two blocks differ.

    Args:
        first: its bytes, as ``uint8``.
        second: the same number of elements.
        types: of the elements; ``are_comparable``.
    """
    compare = _same_type if types[0] == types[1] else _two_types
    blocks, other_blocks = _blocks(first, types[0]), _blocks(second, types[1])
    found = ElementDifferences()
    for one, other in zip(blocks, other_blocks, strict=True):
        found = found.joined(compare(one, other, types))
    return found


def _blocks(content: _Array, element: ElementType) -> Iterator[_Array]:
    step = _MAX_ELEMENTS * element.num_bytes
    for begin in range(0, len(content), step):
        yield content[begin : begin + step]


def _same_type(
    first: _Array, second: _Array, types: tuple[ElementType, ElementType]
) -> ElementDifferences:
    if np.array_equal(first, second):
        return ElementDifferences()
    element = types[0]
    name = _PARTS.get(element.name, element.name)
    is_number = name in _INTEGERS or name in _FLOATS
    width = element.num_bytes // (2 if element.name in _PARTS else 1) if is_number else 1
    bits, other_bits = first.view(_UNSIGNED[width]), second.view(_UNSIGNED[width])
    differs = bits != other_bits
    per_element = element.num_bytes // width
    num_different = int(np.count_nonzero(differs.reshape(-1, per_element).any(axis=1)))
    bits, other_bits = bits[differs], other_bits[differs]
    if name in _INTEGERS:
        largest = _distances(*(each.view(_integer(name)) for each in (bits, other_bits))).max()
        return ElementDifferences(num_different, max_absolute=int(largest))
    if name not in _FLOATS:
        return ElementDifferences(num_different)
    values, other_values = _values(bits, name), _values(other_bits, name)
    is_nan = np.isnan(values) | np.isnan(other_values)
    absolute, relative = _magnitudes(values[~is_nan], other_values[~is_nan])
    steps = _distances(_ordered(bits[~is_nan], name), _ordered(other_bits[~is_nan], name))
    return ElementDifferences(
        num_different,
        num_nan=int(np.count_nonzero(is_nan)),
        max_absolute=absolute,
        max_relative=relative,
        max_ulp=int(steps.max()) if len(steps) else None,
    )


def _two_types(
    first: _Array, second: _Array, types: tuple[ElementType, ElementType]
) -> ElementDifferences:
    """Of two types the values are compared: a value is the same in both, or not."""
    values, other_values = (
        _values(each.view(_UNSIGNED[element.num_bytes]), element.name)
        for each, element in zip((first, second), types, strict=True)
    )
    are_nan = np.isnan(values), np.isnan(other_values)
    differs = (values != other_values) & ~(are_nan[0] & are_nan[1])
    is_nan = are_nan[0] != are_nan[1]
    counted = differs & ~is_nan
    absolute, relative = _magnitudes(values[counted], other_values[counted])
    return ElementDifferences(
        num_different=int(np.count_nonzero(differs)),
        num_nan=int(np.count_nonzero(is_nan)),
        max_absolute=absolute,
        max_relative=relative,
    )


def _magnitudes(values: _Array, others: _Array) -> tuple[float | None, float | None]:
    """The largest absolute and relative difference of numbers in float64, if there are any."""
    if not len(values):
        return None, None
    with np.errstate(all="ignore"):  # an infinity or an overflow is a result here
        absolute = np.abs(values - others)
        relative = absolute / np.maximum(np.abs(values), np.abs(others))
    relative[np.isinf(absolute)] = np.inf
    relative[absolute == 0] = 0.0  # zeros of both signs
    return float(absolute.max()), float(relative.max())


def _values(bits: _Array, name: str) -> _Array:
    """Floating-point numbers as float64, which holds each of them exactly."""
    if name in _NUMPY_FLOATS:
        return bits.view(name).astype(np.float64)
    tensor = torch.from_numpy(np.ascontiguousarray(bits).view(_SIGNED[bits.dtype.itemsize]))
    return tensor.view(getattr(torch, name)).to(torch.float64).numpy()


def _ordered(bits: _Array, name: str) -> _Array:
    """Whole numbers in the order of the values, neighbours one apart; both zeros are 0."""
    if name == _WITHOUT_SIGN:
        return bits.astype(np.int64)
    signed = f"i{bits.dtype.itemsize}"
    magnitude: _Array = (bits & (np.iinfo(bits.dtype).max >> 1)).view(signed)
    np.negative(magnitude, out=magnitude, where=bits.view(signed) < 0)
    return magnitude


def _distances(first: _Array, second: _Array) -> _Array:
    """The distances of whole numbers of one type, exact: as unsigned numbers of its width."""
    unsigned = _UNSIGNED[first.dtype.itemsize]
    larger, smaller = np.maximum(first, second), np.minimum(first, second)
    found: _Array = larger.view(unsigned) - smaller.view(unsigned)
    return found


def _integer(name: str) -> type[Any]:
    found: type[Any] = np.uint8 if name == "bool" else getattr(np, name)
    return found


# ---------------------------------------------------------------- tensors

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
