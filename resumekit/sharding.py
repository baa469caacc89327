"""Tensors of which every rank holds a part: what part that is, and how such a tensor is made.

torch's DTensor is asked for only where a program has loaded it: importing it takes a second.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resumekit.errors import UnsupportedValueError

WHOLE = "whole"  # the copy group of plain tensors


@dataclass(frozen=True)
class Box:
    """A part of a tensor that goes from one corner to another.

    Args:
        offsets: where it begins in each dimension of the whole tensor, in elements.
        sizes: how far it goes in each dimension, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """The elements in it."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        ends = (begin + size for begin, size in zip(self.offsets, self.sizes, strict=True))
        pairs = zip(self.offsets, ends, strict=True)
        return "[" + ", ".join(f"{begin}:{end}" for begin, end in pairs) + "]"


def is_sharded(value: Any) -> bool:
    """Whether this is a DTensor, a parameter or not."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Any) -> Any:
    """The memory of this rank: a DTensor's local tensor, and any other value itself."""
    # Not to_local(): that is an operation of autograd, and waits for nothing that a settled
    # point has not waited for. torch 2.13 tensor/_api.py, DTensor.__new__ sets the attribute.
    return tensor._local_tensor if is_sharded(tensor) else tensor


def box_of(tensor: Any, where: str) -> Box | None:
    """The part of a tensor that this rank holds; None where its mesh leaves this rank out.

    Args:
        tensor: a DTensor or a plain tensor.
        where: what errors call it.

    Raises:
        UnsupportedValueError: it holds sums that are not summed up over the ranks yet, or its local
            tensor is not the box that its placements say.
    """
    if not is_sharded(tensor):
        return Box.whole(tuple(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedValueError(
            where,
            found=f"a tensor with the placements {tensor.placements}: each rank holds a summand",
            expected="placements without Partial",
            remedy="Call redistribute() with Replicate or Shard first",
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    local = tuple(local_part(tensor).shape)
    if box.num_elements != math.prod(local) or (box.num_elements and box.sizes != local):
        raise UnsupportedValueError(
            where,
            found=f"a local tensor of shape {local}",
            expected=f"{box.sizes}, as its placements {tensor.placements} say",
        )
    return box


def copy_group(tensor: Any, num_ranks: int) -> str | None:
    """What the ranks that hold the same part of a tensor have in common; None for the only holder.

    Args:
        tensor: a DTensor or a plain tensor, which every rank holds whole.
        num_ranks: of the job.
    """
    if not is_sharded(tensor):
        return WHOLE
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    shape = tuple(mesh.shape)
    split = [d for d, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    num_holders = num_ranks // math.prod(shape[d] for d in split)
    if num_holders == 1:
        return None
    return f"{tensor.placements} on {shape} at {[coordinate[d] for d in split]}"


def sharded_like(partner: Any, local: Tensor) -> Any:
    """A DTensor of the partner's shape, mesh and placements around this rank's part.

    The part stays where it is: one in host memory may stand for a tensor of another device until it
    is copied there.

    Args:
        partner: a DTensor.
        local: this rank's part of the new tensor, of any dtype.
    """
    # torch 2.13 distributed/fsdp/_fully_shard/_fsdp_common.py, _from_local_no_grad, makes DTensors
    # in this way; DTensor.from_local would move the part to the mesh's device.
    spec = partner._spec
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    kind = sys.modules["torch.distributed.tensor"].DTensor
    return kind(local, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)


def part_like(partner: Any, saved: Any) -> Any:
    """A whole tensor cut to the part that the partner has here; anything else as it is.

    Args:
        partner: the live value.
        saved: what is to be copied into it.
    """
    if not is_sharded(partner) or is_sharded(saved) or not isinstance(saved, Tensor):
        return saved
    if saved.shape != partner.shape:
        return saved
    box = box_of(partner, "a live tensor")
    if box is None:
        return sharded_like(partner, local_part(partner).detach())
    cut = tuple(
        slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True)
    )
    return sharded_like(partner, saved[cut].clone())


def fill(live: Any, saved: Any) -> None:
    """Copies a saved tensor into a live one of the same shape, each rank its own part."""
    source, target = local_part(part_like(live, saved)), local_part(live)
    with torch.no_grad():
        if target.numel():  # of a rank outside the mesh, nothing
            target.copy_(source)
