"""Which tensors share memory, and what is stored so that they share it again after a load.

Tensors are compared by the stretch of memory that they span. Alone in its stretch: stored under its
own name. The same view twice (tied weights): stored once, under the first name. Different views
that overlap: the one that covers the others is stored, or else the whole stretch, and each view is
noted as type, shape, strides and offset. Views that do not overlap are separate tensors: nothing
that is done to one of them can be seen in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from resumekit.serialization.dtypes import ELEMENT_TYPES
from resumekit.serialization.found import FoundTensor
from resumekit.serialization.leaves import Leaf, retyped
from resumekit.serialization.places import UniqueNames

_ALIGNMENT = 16  # of the largest element, counted from the beginning of its storage


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


def store(found: Sequence[FoundTensor], names: UniqueNames) -> StoredTensors:
    """What to store for these tensors.

    Args:
        found: every tensor of the payload, in the order met.
        names: for stretches of memory that no single tensor covers.
    """
    stored = StoredTensors(references=[None] * len(found))
    for indices in _clusters(found):
        cluster = {index: found[index] for index in indices}
        base = _base(cluster)
        if base is None:
            _store_stretch(cluster, stored, names)
        else:
            _store_base(base, cluster, stored)
    return stored


def _clusters(found: Sequence[FoundTensor]) -> list[list[int]]:
    """The tensors' indices, those that overlap in memory together, in the order met."""
    clusters = [[index] for index, item in enumerate(found) if item.shares_nothing]
    spans = sorted(
        (*item.memory, *item.span, index)
        for index, item in enumerate(found)
        if not item.shares_nothing
    )
    reached = ("", 0, 0)
    for device, storage, begin, end, index in spans:
        if (device, storage) == reached[:2] and begin < reached[2]:
            clusters[-1].append(index)
            end = max(end, reached[2])
        else:
            clusters.append([index])
        reached = (device, storage, end)
    return sorted(sorted(cluster) for cluster in clusters)


def _base(cluster: Mapping[int, FoundTensor]) -> FoundTensor | None:
    """The member to store, which the others are the same as, or views of; None if there is none."""
    items = list(cluster.values())
    first = items[0]
    if first.shares_nothing:
        return first
    if all(item.view == first.view for item in items) and not first.overlaps_itself:
        return first
    begin = min(item.span[0] for item in items)
    end = max(item.span[1] for item in items)
    if any((item.span[0] - begin) % item.element.num_bytes for item in items):
        return None  # a view begins at a whole element of its type, counted from the base
    whole = (item for item in items if item.span == (begin, end) and item.is_row_major)
    return next(whole, None)


def _store_base(
    base: FoundTensor, cluster: Mapping[int, FoundTensor], stored: StoredTensors
) -> None:
    stored.leaves[base.name] = base.leaf()
    for index, item in cluster.items():
        if item.view != base.view:
            stored.references[index] = item.view_of(base.name, base.span[0])
            continue
        stored.references[index] = base.name
        if item is not base:
            stored.ties[item.name] = base.name


def _store_stretch(
    cluster: Mapping[int, FoundTensor], stored: StoredTensors, names: UniqueNames
) -> None:
    """Stores the bytes that the cluster spans, and every member as a view of them."""
    items = list(cluster.values())
    # Two storages may begin at one address (torch.from_numpy twice): the longer one has all of it.
    longest = max(items, key=lambda item: item.tensor.untyped_storage().nbytes())
    storage = longest.memory[1]
    offset = (min(item.span[0] for item in items) - storage) // _ALIGNMENT * _ALIGNMENT
    num_bytes = max(item.span[1] for item in items) - storage - offset
    stretch = retyped(longest.tensor, torch.uint8, offset, (num_bytes,), (1,))
    name = names.take(f"{items[0].name}.storage")
    stored.leaves[name] = Leaf(stretch, ELEMENT_TYPES["uint8"], (num_bytes,))
    for index, item in cluster.items():
        stored.references[index] = item.view_of(name, storage + offset)
