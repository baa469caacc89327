"""One rank's view of a state whose tensors are spread: a tree without values, and its parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from resumekit.serialization.encode import Encoder
from resumekit.serialization.found import FoundTensor
from resumekit.serialization.leaves import Leaf
from resumekit.serialization.places import Place
from resumekit.serialization.sharded.index import part_name
from resumekit.serialization.sharding import FlatPart, is_sharded, local_part, pieces_of


@dataclass(frozen=True)
class LocalState:
    """A state as one rank holds it.

    Args:
        key: the component's key.
        tree: what is not a tensor, with the name of a tensor where one stands.
        tensors: the live tensors by name, in parts or plain.
        found: the part of each that lies in this rank's memory.
        leaves: bytes that are no tensors, alike on every rank.
        ties: names of tensors that are the same tensor as another name.
        first_rank_only: the plain tensors that may differ between the ranks; rank 0's are stored.
    """

    key: str
    tree: Any
    tensors: dict[str, Any]
    found: dict[str, FoundTensor]
    leaves: dict[str, Leaf]
    ties: dict[str, str]
    first_rank_only: frozenset[str] = frozenset()

    @property
    def layout(self) -> Any:
        """All that a plan depends on; the plan for an equal one is the same plan."""
        tensors = {
            name: (tensor.dtype, tensor.shape, local_part(tensor).shape, spreading(tensor))
            for name, tensor in self.tensors.items()
        }
        return tensors, self.ties, self.first_rank_only

    def leaves_of(self, name: str) -> Iterator[tuple[str, Leaf]]:
        """This rank's parts of a tensor, each with the name that it is stored under."""
        found = self.found[name]
        for number, piece in enumerate(pieces_of(self.tensors[name])):
            yield part_name(name, number), FoundTensor(piece, found.place, name).leaf()


def encode_local(key: str, state: Any, *, first_rank_only: Collection[str] = ()) -> LocalState:
    """The state of one component as this rank holds it; nothing is copied.

    Args:
        key: the component's key.
        state: nested state; tensors are named by their place in it, a model's by FQN.
        first_rank_only: names of plain tensors that may differ between the ranks.

    Raises:
        UnsupportedValueError: a value cannot be stored; names its place.
    """
    encoder = _LocalEncoder()
    tree = encoder.encode(state, where=key)
    return LocalState(
        key,
        tree,
        encoder.tensors,
        encoder.found,
        encoder.plain_leaves,
        encoder.ties,
        frozenset(first_rank_only),
    )


def spreading(tensor: Any) -> Any:
    """The mesh and the placements of a DTensor; None for a plain tensor. Equal for equal ones."""
    if isinstance(tensor, FlatPart):
        return tensor.begin
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


class _LocalEncoder(Encoder):
    """Notes tensors by name instead of arranging them, and takes DTensors by their local part."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Any] = {}
        self.found: dict[str, FoundTensor] = {}
        self.ties: dict[str, str] = {}
        self._owners: dict[Any, str] = {}
        self._by_type[FlatPart] = self._flat

    @property
    def plain_leaves(self) -> dict[str, Leaf]:
        """Bytes that are no tensors, by name."""
        return self._leaves

    def _flat(self, value: FlatPart, place: Place, _: int) -> Any:
        name = self._name(place)
        # A tie is one object in two places: that is seen by ranks whose part is empty as well.
        first = self._owners.setdefault(id(value), name)
        if first != name:
            self.ties[name] = first
            return {"$tensor": first}
        self.tensors[name] = value
        self.found[name] = FoundTensor(value.local, place, name)
        return {"$tensor": name}

    def _tensor(self, value: Tensor, place: Place) -> Any:
        name = self._name(place)
        found = FoundTensor(local_part(value), place, name)
        self._found.append(found)  # where a tensor as a key is noticed
        if not found.shares_nothing:
            view = (found.view, tuple(value.shape), spreading(value))
            first = self._owners.setdefault(view, name)
            if first != name:
                self.ties[name] = first
                return {"$tensor": first}
        self.tensors[name] = value
        self.found[name] = found
        return {"$tensor": name}
