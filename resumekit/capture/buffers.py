"""The buffers of a replicated module, which are not the same on every rank.

DDP averages gradients, not buffers: the running statistics of a batch norm follow each rank's own
batches. (DDP copies rank 0's over before each forward pass unless ``broadcast_buffers=False``.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from resumekit.capture.flat import model_state
from resumekit.capture.naming import clean_names
from resumekit.capture.restore import Mismatch, describe, name_mismatches, refuse
from resumekit.layout import WorldChange
from resumekit.serialization import is_sharded

# What the key of such a component ends in.
RANK_BUFFERS = "rank_buffers"

_REMEDY = "Build the model as it was when the checkpoint was written"


class RankBuffers:
    """This rank's own persistent buffers of a module, by wrapper-free name.

    Args:
        module: the module, wrapped or not.
        key: the component's key, for errors.
    """

    def __init__(self, module: nn.Module, *, key: str) -> None:
        self.module = module
        self.key = key

    def state_dict(self) -> dict[str, Tensor]:
        """The live buffers, not copies."""
        state = model_state(self.module, key=self.key).state_dict()
        raw_names = (name for name, _ in self.module.named_buffers())
        names = clean_names(self.module, raw_names).values()
        # The parts of a sharded buffer belong together, and are saved with the model.
        return {
            name: state[name] for name in names if name in state and not is_sharded(state[name])
        }

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: a name, a shape or a dtype differs.
        """
        live = self.state_dict()
        saved = {name: describe(value) for name, value in state.items()}
        here = {name: describe(value) for name, value in live.items()}
        problems = name_mismatches(saved, here)
        problems += [
            Mismatch(name, f"{saved[name]} in the checkpoint", f"{here[name]} as here")
            for name in here
            if name in saved and saved[name] != here[name]
        ]
        refuse(self.key, problems, remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Copies every value into the live buffer of that name."""
        with torch.no_grad():
            for name, buffer in self.state_dict().items():
                buffer.copy_(state[name])
        return ()

    def start_fresh(self) -> tuple[str, ...]:
        """They came with the module: a checkpoint of one rank has no others."""
        return (f"{self.key}: every rank begins with the buffers that were saved with the module",)

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Tensor]], change: WorldChange
    ) -> tuple[Mapping[str, Tensor], tuple[str, ...]]:
        """This rank's buffers in a job with another number of ranks; a new one gets a copy."""
        remark = f"{self.key}: rank {change.rank} is new, its buffers are those of rank "
        return (
            states[change.model_rank],
            (f"{remark}{change.model_rank}",) if change.is_new else (),
        )
