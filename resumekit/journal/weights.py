"""What the journal compares of the weights: samples of a few tensors at each step, all in turn."""

from __future__ import annotations

import ctypes
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
        is_on_host, samples = _tensor(groups, 0).is_cpu, []
        num_tensors = min(total, _ON_HOST if is_on_host else _ON_DEVICE)
        for turn in range(step * num_tensors, (step + 1) * num_tensors):
            tensor = _tensor(groups, turn % total)
            is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
            if not is_plain or tensor.is_cpu is not is_on_host:
                continue
            if is_on_host:
                samples.append(_sample(tensor, turn // total))
            else:
                elements = tensor.detach().flatten()
                window = _window(len(elements), turn // total)
                self.late.add(step, elements[window.start : window.stop])
        return _records(step, samples)

    def arrived(self) -> list[Record]:
        """The records of the samples that devices have delivered since the last call."""
        found = (_records(step, [_sample(host)]) for step, host in self.late.arrived())
        return [each for records in found for each in records]


def _tensor(groups: Iterable[Sequence[Any]], index: int) -> Any:
    for group in groups:
        if index < len(group):
            tensor = group[index]
            return tensor if type(tensor) in _PLAIN else local_part(tensor)
        index -= len(group)
    raise IndexError(index)


def _sample(tensor: torch.Tensor, turn: int = 0) -> tuple[bytes, int]:
    """Elements of a tensor in host memory, in the order of the memory, and their number.

    They are read without an operation of torch: each lets other threads run, as those of a
    loader with workers, and a switch costs more than all else here.
    """
    if not (tensor.is_contiguous() or _span(tensor) == tensor.numel()):
        tensor = tensor.detach().contiguous()
    storage, size = tensor.untyped_storage(), tensor.itemsize
    window = _window(tensor.numel(), turn)
    start, num_bytes = (tensor.storage_offset() + window.start) * size, len(window) * size
    if start + num_bytes > storage.nbytes():  # freed, as in sharded modules
        return b"", 0
    return ctypes.string_at(storage.data_ptr() + int(start), num_bytes), len(window)


def _span(tensor: torch.Tensor) -> int:
    """From a tensor's first element to its last one, in elements."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _window(num_elements: int, turn: int) -> range:
    """Some of all elements, the next ones in each turn."""
    num_windows = max(1, -(-num_elements // _NUM_ELEMENTS))
    start = turn % num_windows * _NUM_ELEMENTS
    return range(start, min(start + _NUM_ELEMENTS, num_elements))


def _records(step: int, samples: Sequence[tuple[bytes, int]]) -> list[Record]:
    count = sum(each for _, each in samples)
    ids = xxhash.xxh3_64_intdigest(b"".join(each for each, _ in samples))
    return [Record(step, ids=ids, num_samples=count, kind=WEIGHTS)] if count else []
