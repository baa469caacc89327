"""What a batch is: its tensors, how many samples they have, and which ones in any order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from resumekit.recorder.digests import byte_view, local_part, tensor_digest

# More samples than this are not digested one by one.
_MAX_SAMPLES = 4096
_MASK = (1 << 64) - 1


@dataclass
class BatchRecord:
    """The tensors that models were called with since the last step.

    Args:
        digests: of each tensor.
        counts: the samples of each, by its first dimension.
        sets: a digest of the rows of each that does not depend on their order.
    """

    digests: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)

    def add(self, inputs: Any) -> None:
        """Adds the tensors that no trained weight has gone into.

        Args:
            inputs: of a model, nested.
        """
        for tensor in _tensors(inputs):
            self.digests.append(tensor_digest(tensor))
            self.counts.append(len(tensor) if tensor.ndim else 1)
            self.sets.append(_set_digest(local_part(tensor).detach()))


def _set_digest(tensor: torch.Tensor) -> str:
    if not tensor.ndim:
        return tensor_digest(tensor)
    if len(tensor) > _MAX_SAMPLES or not tensor.numel() or tensor.is_meta:
        return ""
    rows = byte_view(tensor).reshape(len(tensor), -1).numpy()
    total = sum(xxhash.xxh3_64_intdigest(row.data) for row in rows)
    return f"{total & _MASK:016x}"


def _tensors(inputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        if not inputs.requires_grad:
            yield inputs
    elif isinstance(inputs, dict):
        for value in inputs.values():
            yield from _tensors(value)
    elif isinstance(inputs, (list, tuple)):
        for value in inputs:
            yield from _tensors(value)
