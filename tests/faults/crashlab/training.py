"""A small real training run, and its run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit import ResumeReport
from resumekit.adapters.torch import Checkpointer
from resumekit.serialization.digests import state_digest

NEWEST = "step-00000004"
OLDER = "step-00000002"


@dataclass
class Live:
    """The objects of one launch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    extras: dict[str, Any]
    checkpointer: Checkpointer

    @classmethod
    def launch(cls, directory: Path, *, seed: int = 0, **options: Any) -> Live:
        """Everything a script makes before its loop."""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        extras = {"phase": f"warmup {seed}"}
        checkpointer = Checkpointer(
            directory,
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            extras=extras,
            **{"save_every": 2, **options},
        )
        return cls(model, optimizer, scheduler, extras, checkpointer)

    def train(self, *, until: int) -> None:
        """Trains to a step in the middle of the run and leaves."""
        data = TensorDataset(torch.arange(96.0).reshape(16, 6) / 96, torch.arange(16) % 3)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        with self.checkpointer:
            for inputs, labels in self.checkpointer.batches(loader, epochs=4):
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.lr_scheduler.step()
                self.extras["phase"] = f"step {self.checkpointer.progress.step}"
                self.checkpointer.step(loss=loss)
                if self.checkpointer.progress.step == until:
                    break

    def digest(self) -> str:
        """Of everything live that a resume changes before the first batch."""
        return state_digest(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "lr_scheduler": self.lr_scheduler.state_dict(),
                "extras": self.extras,
                "progress": self.checkpointer.progress.as_dict(),
            }
        )


def make_run(directory: Path, *, seed: int = 0) -> Path:
    """A run directory with the checkpoints of steps 2 and 4."""
    Live.launch(directory, seed=seed).train(until=5)
    return directory


def resumed(directory: Path, **options: Any) -> tuple[ResumeReport, str]:
    """What a resume says, and the digest of the live objects after it."""
    live = Live.launch(directory, seed=99, **options)
    with live.checkpointer:
        return live.checkpointer.resume(), live.digest()
