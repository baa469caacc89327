"""Where tensors lay that user code keeps: a checkpoint is read into host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from resumekit.capture.inplace import NewTensor, own_tensor


def off_host(values: Mapping[str, Any], tensors_of: Callable[[Any], Iterable[Tensor]]) -> list[str]:
    """The names of the values that have a tensor in the memory of a device.

    Args:
        values: by name.
        tensors_of: gives the tensors in one of them.
    """
    return [
        name
        for name, value in values.items()
        if any(each.device.type != "cpu" for each in tensors_of(value))
    ]


def made_on(device: torch.device | None) -> NewTensor:
    """What makes a tensor of its own there from one that was read; None leaves it where it is."""
    if device is None:
        return own_tensor
    return lambda saved: saved.detach().to(device, copy=True)


def device_of(modules: Iterable[nn.Module]) -> torch.device | None:
    """The device of the first parameter or buffer; None where there is none."""
    tensors = (each for m in modules for group in (m.parameters(), m.buffers()) for each in group)
    first = next(tensors, None)
    return None if first is None else first.device
