"""A tensor met in a state: whether it can be stored, and what stretch of memory it spans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.dtypes import ElementType, element_type
from resumekit.serialization.leaves import Leaf, dense_strides
from resumekit.serialization.places import Place


@dataclass(frozen=True)
class FoundTensor:
    """A tensor met in a state.

    Args:
        tensor: the live tensor.
        place: where it stands.
        name: the name that it is stored under if it gets bytes of its own.

    Raises:
        UnsupportedValueError: it cannot be stored bit for bit; names the place.
    """

    tensor: torch.Tensor
    place: Place
    name: str

    def __post_init__(self) -> None:
        check_tensor(self.tensor, self.place)

    @property
    def element(self) -> ElementType:
        """The type of its elements."""
        element = element_type(self.tensor.dtype)
        assert element is not None  # check_tensor
        return element

    @cached_property
    def memory(self) -> tuple[str, int]:
        """The device and the address of its storage."""
        return str(self.tensor.device), self.tensor.untyped_storage().data_ptr()

    @cached_property
    def span(self) -> tuple[int, int]:
        """The addresses of its first byte and of the byte after its last."""
        return _span(self.tensor)

    @cached_property
    def view(self) -> tuple[Any, ...]:
        """What two tensors that are the same view of the same memory have in common."""
        return (self.memory, self.span, self.tensor.dtype, self.tensor.shape, self.tensor.stride())

    @property
    def is_row_major(self) -> bool:
        """Whether its strides are those of a new tensor of its shape."""
        return self.tensor.stride() == dense_strides(tuple(self.tensor.shape))

    @property
    def overlaps_itself(self) -> bool:
        """Whether some of its elements share their memory, as those of an expanded tensor do."""
        begin, end = self.span
        return self.tensor.numel() * self.element.num_bytes > end - begin

    @property
    def shares_nothing(self) -> bool:
        """Whether no other tensor can see what is done to it: it has no bytes.

        One that is lazily conjugated or negated counts too: its memory does not hold its values.
        """
        return self.tensor.numel() == 0 or self.tensor.is_conj() or self.tensor.is_neg()

    def leaf(self) -> Leaf:
        """Its values as a leaf of its own."""
        shape = tuple(self.tensor.shape)
        strides: tuple[int, ...] | None = None
        if self.tensor.numel() and not self.is_row_major:
            # Holes are not stored; what is kept is the order of the dimensions in memory.
            strides = torch.empty_like(self.tensor, device="meta").stride()
            strides = None if strides == dense_strides(shape) else strides
        return Leaf(self.tensor, self.element, shape, strides)

    def view_of(self, name: str, begin: int) -> dict[str, Any]:
        """What says in a tree that it is a view.

        Args:
            name: the tensor that it is a view of.
            begin: the address of that tensor.
        """
        return {
            "of": name,
            "dtype": self.element.name,
            "shape": list(self.tensor.shape),
            "strides": list(self.tensor.stride()),
            "offset": self.span[0] - begin,
        }


def check_tensor(tensor: torch.Tensor, place: Place) -> None:
    """Raises UnsupportedValueError for a tensor that cannot be stored bit for bit."""
    reason = _refusal(tensor)
    if reason is not None:
        found, remedy = reason
        raise UnsupportedValueError(str(place), found=found, remedy=remedy)


def _refusal(tensor: torch.Tensor) -> tuple[str, str] | None:
    kind = type(tensor)
    if kind.__name__ in ("DTensor", "ShardedTensor"):
        return f"a sharded tensor ({kind.__name__})", "Sharded tensors need the sharded path"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})", "Store its int_repr() and its scales"
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {layout}", "Store its parts, or to_dense()"
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return f"a tensor of class {kind.__module__}.{kind.__qualname__}", "Store a plain tensor"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no values", "Materialise it first"
    if element_type(tensor.dtype) is None:
        return f"a tensor of the unknown type {tensor.dtype}", "Store it as a known type"
    storage = tensor.untyped_storage()
    if _span(tensor)[1] > storage.data_ptr() + storage.nbytes():
        return "a tensor whose memory has been freed", "Gather or restore it first"
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    # Not data_ptr() of the tensor: that is 0 for an empty one, and refuses a lazily conjugated one.
    offset = int(tensor.storage_offset()) * tensor.element_size()
    begin = tensor.untyped_storage().data_ptr() + offset
    if tensor.numel() == 0:
        return begin, begin
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
