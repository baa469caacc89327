"""Which tensors share memory, and what is stored so that they share it again after a load.

Tensors are compared by the stretch of memory that they span. Alone in its stretch: stored under
its own name. The same view twice (tied weights): stored once, under the first name. Different views
that overlap: the one that covers the others is stored, or else the whole stretch, and each view is
noted as type, shape, strides and offset. Views that do not overlap are separate tensors: nothing
that is done to one of them can be seen in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from resumekit.errors import UnsupportedValueError
from resumekit.payload.dtypes import ELEMENT_TYPES, ElementType, element_type
from resumekit.payload.leaves import Leaf, dense_strides
from resumekit.payload.places import Place, UniqueNames

_ALIGNMENT = 16  # the largest element; a storage begins at its first


@dataclass(frozen=True)
class FoundTensor:
    """A tensor met in a value, checked.

    Args:
        tensor: the live tensor.
        place: where it stands.
        name: the name that it is stored under if it gets bytes of its own.
    """

    tensor: torch.Tensor
    place: Place
    name: str


@dataclass(frozen=True)
class StoredTensors:
    """What to store.

    Args:
        leaves: what gets bytes, by name.
        references: for each tensor found, in order, what stands in its place in the tree.
        ties: the names that have no bytes of their own, with the name that has the same tensor.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    references: list[Any] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)


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
        return (
            f"a quantised tensor ({tensor.dtype})",
            "Store its int_repr() and scales",
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {layout}", "Store its parts, or to_dense()"
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return f"a tensor of class {kind.__module__}.{kind.__qualname__}", "Store a plain tensor"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no values", "Materialise it first"
    if element_type(tensor.dtype) is None:
        return f"a tensor of the unknown type {tensor.dtype}", "Store it as a known type"
    end = _span(tensor)[1]
    if end - tensor.untyped_storage().data_ptr() > tensor.untyped_storage().nbytes():
        return "a tensor whose memory has been freed", "Gather or restore it first"
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the byte after its last."""
    # Not data_ptr() of the tensor: that is 0 for an empty one, and refuses a lazily conjugated one.
    offset = int(tensor.storage_offset()) * tensor.element_size()
    begin = tensor.untyped_storage().data_ptr() + offset
    if tensor.numel() == 0:
        return begin, begin
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def store(found: Sequence[FoundTensor], names: UniqueNames) -> StoredTensors:
    """What to store for these tensors.

    Args:
        found: every tensor of the payload, in the order met.
        names: for stretches of memory that no single tensor covers.
    """
    stored = StoredTensors(references=[None] * len(found))
    for cluster in _clusters(found):
        _store_cluster({index: found[index] for index in cluster}, stored, names)
    return stored


def _clusters(found: Sequence[FoundTensor]) -> list[list[int]]:
    """The tensors' indices, those that overlap in memory together, in the order met."""
    spans = []
    clusters = []
    for index, item in enumerate(found):
        tensor = item.tensor
        if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            clusters.append([index])  # shares no byte, or is not what the bytes say
        else:
            storage = tensor.untyped_storage().data_ptr()
            spans.append((str(tensor.device), storage, *_span(tensor), index))
    reached: tuple[str, int, int] = ("", 0, 0)
    for device, storage, begin, end, index in sorted(spans):
        if (device, storage) == reached[:2] and begin < reached[2]:
            clusters[-1].append(index)
            reached = (device, storage, max(end, reached[2]))
        else:
            clusters.append([index])
            reached = (device, storage, end)
    return sorted(sorted(cluster) for cluster in clusters)


def _store_cluster(
    cluster: dict[int, FoundTensor], stored: StoredTensors, names: UniqueNames
) -> None:
    base = next(iter(cluster.values()))
    same = {_view_key(item.tensor) for item in cluster.values()}
    if len(same) > 1 or _overlaps_itself(base.tensor):
        covering = _covering(cluster)
        if covering is None:
            _store_stretch(cluster, stored, names)
            return
        base = covering
    stored.leaves[base.name] = _own_leaf(base.tensor)
    for index, item in cluster.items():
        if _view_key(item.tensor) == _view_key(base.tensor):
            stored.references[index] = base.name
            if item is not base:
                stored.ties[item.name] = base.name
        else:
            stored.references[index] = _view(item.tensor, base.name, _span(base.tensor)[0])


def _covering(cluster: dict[int, FoundTensor]) -> FoundTensor | None:
    """The first row-major tensor that spans the cluster and that every other is a view of."""
    spans = {index: _span(item.tensor) for index, item in cluster.items()}
    whole = min(begin for begin, _ in spans.values()), max(end for _, end in spans.values())
    aligned = all(
        (begin - whole[0]) % cluster[index].tensor.element_size() == 0
        for index, (begin, _) in spans.items()
    )
    for index, item in cluster.items():
        if aligned and spans[index] == whole and _is_row_major(item.tensor):
            return item
    return None


def _store_stretch(
    cluster: dict[int, FoundTensor], stored: StoredTensors, names: UniqueNames
) -> None:
    """Stores the bytes that the cluster spans, and every member as a view of them."""
    first = next(iter(cluster.values()))
    storage = max(
        (item.tensor.untyped_storage() for item in cluster.values()), key=lambda s: s.nbytes()
    )
    begin = min(_span(item.tensor)[0] for item in cluster.values())
    end = max(_span(item.tensor)[1] for item in cluster.values())
    offset = (begin - storage.data_ptr()) // _ALIGNMENT * _ALIGNMENT
    num_bytes = end - storage.data_ptr() - offset
    stretch = torch.empty(0, dtype=torch.uint8, device=first.tensor.device)
    stretch.set_(storage, offset, (num_bytes,), (1,))
    name = names.take(f"{first.name}.storage")
    stored.leaves[name] = Leaf(stretch, ELEMENT_TYPES["uint8"], (num_bytes,))
    for index, item in cluster.items():
        stored.references[index] = _view(item.tensor, name, storage.data_ptr() + offset)


def _own_leaf(tensor: torch.Tensor) -> Leaf:
    shape = tuple(tensor.shape)
    strides: tuple[int, ...] | None = None
    if tensor.numel() and tensor.stride() != dense_strides(shape):
        # Holes are not stored; what is kept is the order of the dimensions in memory.
        strides = torch.empty_like(tensor, device="meta").stride()
        strides = None if strides == dense_strides(shape) else strides
    return Leaf(tensor, _element(tensor), shape, strides)


def _view(tensor: torch.Tensor, name: str, begin: int) -> dict[str, Any]:
    return {
        "of": name,
        "dtype": _element(tensor).name,
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": _span(tensor)[0] - begin,
    }


def _element(tensor: torch.Tensor) -> ElementType:
    element = element_type(tensor.dtype)
    assert element is not None  # check_tensor
    return element


def _view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (_span(tensor), tensor.dtype, tensor.shape, tensor.stride())


def _is_row_major(tensor: torch.Tensor) -> bool:
    return tensor.stride() == dense_strides(tuple(tensor.shape))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    begin, end = _span(tensor)
    return tensor.numel() * tensor.element_size() > end - begin
