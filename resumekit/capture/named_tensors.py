"""Live tensors by name, restored in place: a rank's own buffers, and parameters of no module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from resumekit.capture.model import REMEDY, ModelState
from resumekit.capture.nested_state import refuse, state_mismatches
from resumekit.serialization.sharding import fill
from resumekit.state import ComponentState, Renamed, Resplit, WorldChange

# What the key of the component of a rank's buffers ends in.
RANK_BUFFERS = "rank_buffers"


class NamedTensors(ComponentState):
    """Live tensors by name, restored in place.

    Args:
        named: gives the tensors; called for each save and restore, because some may be added later.
        key: the component's key, for errors.
    """

    remedy = REMEDY

    def __init__(self, named: Callable[[], dict[str, Tensor]], *, key: str) -> None:
        self.named = named
        self.key = key

    def state_dict(self) -> dict[str, Tensor]:
        """The live values, not copies."""
        return {name: tensor.detach() for name, tensor in self.named().items()}

    def check_state_dict(self, state: Any) -> None:
        """Refuses other names, shapes and dtypes."""
        refuse(self.key, state_mismatches(state, self.named()), remedy=self.remedy)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into the live tensor of that name."""
        for name, tensor in self.named().items():
            fill(tensor, state[name])
        return ()


class RankBuffers(NamedTensors, Renamed):
    """This rank's persistent buffers of a replicated module, by wrapper-free name.

    DDP averages gradients, not buffers: the running statistics of a batch norm follow each rank's
    own batches. (DDP broadcasts rank 0's before each forward pass unless
    ``broadcast_buffers=False``.)

    Args:
        model: the state of the module.
        key: the component's key, for errors.
    """

    def __init__(self, model: ModelState, *, key: str) -> None:
        super().__init__(model.unsharded_buffers, key=key)  # sharded ones are saved with the model

    def start_fresh(self) -> tuple[str, ...]:
        """A checkpoint of one rank has only the buffers of the module."""
        return (f"{self.key}: every rank begins with the buffers that were saved with the module",)

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """This rank's buffers in a job with another number of ranks; a new rank gets a copy."""
        source = change.model_rank
        message = f"{self.key}: rank {change.rank} is new, its buffers are those of rank {source}"
        return states[source], (message,) if change.is_new else ()
