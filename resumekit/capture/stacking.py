"""Tensors of which each rank has its own, stored as one tensor with a dimension of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from resumekit.serialization.sharding import FlatPart, is_sharded


@dataclass(frozen=True)
class StackedByRank:
    """Stores the unsharded parameters of a sharded model, and what an optimizer has of them.

    Args:
        rank: this rank, its index in the first dimension of what is stored.
        num_ranks: the size of that dimension.
    """

    rank: int
    num_ranks: int

    def parts(self, named: Mapping[str, Tensor]) -> dict[str, FlatPart]:
        """This rank's part of each unsharded tensor; the names of a tied one have the same part."""
        unsharded = {
            n: each for n, each in named.items() if not (is_sharded(each) or is_lazy(each))
        }
        made = {id(each): self._part(each) for each in unsharded.values()}
        return {name: made[id(each)] for name, each in unsharded.items()}

    def _part(self, tensor: Tensor) -> FlatPart:
        shape = torch.Size((self.num_ranks, *tensor.shape))
        return FlatPart(shape, self.rank * tensor.numel(), tensor.detach().reshape(-1))

    def stacked(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """What an optimizer has of a parameter, as it is stored: step counts, too."""
        return {k: self._part(v) if isinstance(v, Tensor) else v for k, v in values.items()}

    def unstacked(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """The values of this rank, from its part of each or from that of all ranks."""
        return {key: self.tensor(value) for key, value in values.items()}

    def tensor(self, stored: Any) -> Any:
        """The tensor of this rank; what is none, as it is."""
        if isinstance(stored, FlatPart):
            return stored.local.view(stored.shape[1:])
        return stored[self.rank] if isinstance(stored, Tensor) else stored
