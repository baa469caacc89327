"""What the journal compares of the weights: samples of a few tensors at each step, all in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash

from resumekit.journal.records import WEIGHTS, Record
from resumekit.journal.step_values import LateCopies
from resumekit.serialization import local_part

# Tensors of a step, and elements of each. From a device each of them is a copy of its own.
_ON_HOST, _ON_DEVICE = 2, 1
_NUM_ELEMENTS = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_IN_NUMPY = frozenset({torch.float32, torch.float64, torch.float16})
_AS_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # others, by their size


class WeightSamples:
    """Digests of samples of the parameters that optimizers train.

    At each step they are of two tensors in host memory, or of one on a device: within as many steps
    as there are tensors, all have had their turn. In its next turn a tensor gives its next
    elements. Of a sharded parameter they are this rank's. A device is never waited for.

    Args:
        optimizers: whose parameters these are, at any time.
    """

    def __init__(self, optimizers: Sequence[Any] = ()) -> None:
        self._optimizers = optimizers
        self.late = LateCopies()

    def take(self, step: int) -> list[Record]:
        """The record of the weights as they are now; none where a device has still to deliver it.

        Args:
            step: the optimizer step; it decides whose turn it is.
        """
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        total = sum(map(len, groups))
        if not total:
            return []
        is_on_host, arrays = local_part(_at(groups, 0)).is_cpu, []
        num_tensors = min(total, _ON_HOST if is_on_host else _ON_DEVICE)
        for turn in range(step * num_tensors, (step + 1) * num_tensors):
            tensor = local_part(_at(groups, turn % total))
            is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
            if not is_plain or tensor.is_cpu is not is_on_host:
                continue
            if is_on_host:
                arrays.append(_array(tensor, turn // total))
            else:
                self.late.add(step, _window(tensor.detach().flatten(), turn // total))
        return _records(step, arrays)

    def arrived(self) -> list[Record]:
        """The records of the samples that devices have delivered since the last call."""
        found = (_records(step, [_array(host)]) for step, host in self.late.arrived())
        return [each for records in found for each in records]


def _at(groups: Iterable[Sequence[Any]], index: int) -> Any:
    for group in groups:
        if index < len(group):
            return group[index]
        index -= len(group)
    raise IndexError(index)


def _array(tensor: torch.Tensor, turn: int = 0) -> Any:
    """Elements of a tensor in host memory, in the order of the memory."""
    values = tensor.detach()
    if values.dtype not in _IN_NUMPY and values.itemsize in _AS_BITS:
        values = values.view(_AS_BITS[values.itemsize])
    return _window(values.numpy().ravel("K"), turn)


def _window(elements: Any, turn: int) -> Any:
    """Some of all elements, the next ones in each turn."""
    num_windows = max(1, -(-len(elements) // _NUM_ELEMENTS))
    start = turn % num_windows * _NUM_ELEMENTS
    return elements[start : start + _NUM_ELEMENTS]


def _records(step: int, arrays: Sequence[Any]) -> list[Record]:
    digest = xxhash.xxh3_64()
    for each in arrays:
        digest.update(each)
    count = sum(map(len, arrays))
    return [Record(step, ids=digest.intdigest(), num_samples=count, kind=WEIGHTS)] if count else []
