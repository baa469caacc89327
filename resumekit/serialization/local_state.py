"""A state as one rank holds it: its tensors by name, sharded or plain, and all else as a tree."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from resumekit.serialization.encoding import Encoder
from resumekit.serialization.layouts import part_name
from resumekit.serialization.leaves import Leaf
from resumekit.serialization.sharding import FlatPart, is_sharded, local_part, pieces_of
from resumekit.serialization.state_paths import StatePath
from resumekit.serialization.tensors import FoundTensor


@dataclass(frozen=True)
class LocalState:
    """A state as one rank holds it.

    Args:
        key: the component's key.
        tree: everything except tensors, which it refers to by name.
        tensors: the live tensors by name, sharded or plain.
        found: the part of each in this rank's memory.
        leaves: bytes that are no tensors, equal on every rank.
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
        """All that a plan depends on; equal layouts have the same plan."""
        tensors = {
            name: (tensor.dtype, tensor.shape, local_part(tensor).shape, sharding_of(tensor))
            for name, tensor in self.tensors.items()
        }
        return tensors, self.ties, self.first_rank_only

    def leaves_of(self, name: str) -> Iterator[tuple[str, Leaf]]:
        """This rank's parts of a tensor, each with the name that it is stored under."""
        path = StatePath(name)
        for number, piece in enumerate(pieces_of(self.tensors[name])):
            yield part_name(name, number), FoundTensor(piece, path, name).leaf()


def encode_local(key: str, state: Any, *, first_rank_only: Collection[str] = ()) -> LocalState:
    """The state of one component as this rank holds it; nothing is copied.

    Args:
        key: the component's key.
        state: nested state; tensors are named by their path in it, a model's by FQN.
        first_rank_only: names of plain tensors that may differ between the ranks.

    Raises:
        UnsupportedValueError: a value cannot be stored; names its path.
    """
    return _LocalEncoder().local_state(key, state, frozenset(first_rank_only))


def sharding_of(tensor: Any) -> Any:
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

    def local_state(self, key: str, state: Any, first_rank_only: frozenset[str]) -> LocalState:
        tree = self.encode(state, where=key)
        self._release()
        return LocalState(
            key, tree, self.tensors, self.found, self._leaves, self.ties, first_rank_only
        )

    def _flat(self, value: FlatPart, path: StatePath, _: int) -> Any:
        found = self._examined(value.local, path)
        # A tie is the same object twice, which ranks with an empty part see too.
        return self._note(value, found, id(value))

    def _tensor(self, value: Tensor, path: StatePath, _: int) -> Any:
        found = self._examined(local_part(value), path)
        view = (found.view, tuple(value.shape), sharding_of(value))
        return self._note(value, found, None if found.is_unaliased else view)

    def _note(self, tensor: Any, found: FoundTensor, identity: object) -> Any:
        """The node of a tensor; equal identities are ties, None is equal to nothing."""
        name = found.name
        first = name if identity is None else self._owners.setdefault(identity, name)
        if first == name:
            self.tensors[name] = tensor
            self.found[name] = found
        else:
            self.ties[name] = first
        return {"$tensor": first}
