"""The state that benchmarks save: GPT-2 124M in float32 with AdamW's moments, and a run over it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from measuring import bytes_of
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from resumekit.adapters.torch import Checkpointer
from resumekit.run.options import Options
from resumekit.serialization.digests import state_digest
from resumekit.storage.directories import StepName

OPTIONS = frozenset(option.name for option in fields(Options))
HAS_ASYNC_SAVES = "async_save" in OPTIONS
NUM_TOKENS = 8  # of a sample: the shorter, the sooner a step is over
_ALWAYS = 10**9
_DELETION_SECONDS = 30


def gpt2(*, tiny: bool = False, num_layers: int = 12) -> GPT2LMHeadModel:
    """GPT-2 124M with random weights; or one of 0.2 million parameters, to try a script.

    Args:
        tiny: whether it is the small one.
        num_layers: of the large one.
    """
    set_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if not tiny:
        return GPT2LMHeadModel(GPT2Config(n_layer=num_layers, **ends))
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=2, **ends))


class Tokens(Dataset[Any]):
    """Samples of a few tokens."""

    def __init__(self, length: int = _ALWAYS) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(NUM_TOKENS) + index) % 256
        return {"input_ids": tokens, "labels": tokens}


@dataclass
class Training:
    """A model and its optimizer.

    Args:
        model: any.
        optimizer: of its parameters.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: nn.Module, *, has_moments: bool = True) -> Training:
        """With AdamW, after one step on random gradients, or before any."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=trained[0].is_cuda)
        training = cls(model, optimizer)
        if has_moments:
            training.step()
        gc.collect()
        return training

    def step(self) -> None:
        """One optimizer step on random gradients, which are gone afterwards."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What torch.save is given."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of the same names."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def digest(self) -> str:
        """Of every value."""
        return state_digest(self.state_dict())

    def num_bytes(self) -> int:
        """Of the tensors, each one once."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for moments in self.optimizer.state.values():
            tensors += [value for value in moments.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in {id(each): each for each in tensors}.values())


class SavingRun:
    """A run of the plain torch adapter that saves where it is asked to, between two batches.

    Args:
        directory: of the run.
        training: what it saves.
        **options: of the Checkpointer.
    """

    def __init__(self, directory: Path, training: Training, **options: Any) -> None:
        self.directory = directory
        self.checkpointer = Checkpointer(
            directory,
            model=training.model,
            optimizer=training.optimizer,
            save_every=None,
            leave_on=(),
            exclude={"variables"},  # a load is measured in another function than a save
            **options,
        )
        loader = DataLoader(Tokens(), batch_size=1)
        self._batches = iter(self.checkpointer.batches(loader, steps=_ALWAYS))
        next(self._batches)

    def save(self) -> None:
        """From the end of a step to the next batch in hand, with a save in between."""
        self.end_step(saves=True)

    def end_step(self, *, saves: bool) -> None:
        """From the end of a step to the next batch."""
        self.checkpointer.step()
        if saves:
            self.checkpointer.save()
        next(self._batches)

    def finish(self) -> None:
        """Waits until nothing of a save is left to do, in this process and on the disk."""
        self.checkpointer.wait()
        deadline = time.monotonic() + _DELETION_SECONDS
        while any(self.directory.glob(".staging/trash-*")) and time.monotonic() < deadline:
            time.sleep(0.01)  # a deletion in the background would slow down what follows
        os.sync()

    def newest(self) -> Path:
        """The directory of the newest checkpoint."""
        return self.directory / str(max(self._names()))

    def has_saved(self) -> bool:
        """Whether there is a checkpoint."""
        return bool(self._names())

    def num_bytes(self) -> int:
        """Of the newest checkpoint."""
        return bytes_of(self.newest())

    def _names(self) -> list[StepName]:
        found = (StepName.parse(path.name) for path in self.directory.iterdir())
        return [name for name in found if name is not None]

    def leave(self) -> None:
        """Gives the directory back without a last save."""
        self.checkpointer.wait()
        self.checkpointer.__exit__(KeyboardInterrupt, None, None)
