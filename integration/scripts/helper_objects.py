"""Helper objects in attributes of modules, with plain PyTorch.

``--case anneal``: a schedule object made in ``__init__``; ``--case roll``, ``flip``, ``permute``: a
tensor above 1 MiB of which only the order of the rows changes.
"""

from __future__ import annotations

import torch
from judged_script import arguments, record
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

NUM_ROWS = 4200  # of 64 floats: above 1 MiB


class Anneal:
    """A scale that falls with each call, ever more slowly."""

    def __init__(self) -> None:
        self.value = 1.0
        self.history: list[float] = []

    def step(self) -> float:
        self.history.append(self.value)
        self.value = 0.9 * self.value + 0.01 * len(self.history)
        return self.value


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.anneal = Anneal()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(images) * self.anneal.step()

    def extra(self) -> object:
        return self.anneal


class Queue(nn.Module):
    """Adds the first rows of a queue to the images, and reorders the queue."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.change = change
        self.queue = torch.randn(NUM_ROWS, 64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(images + 0.3 * self.queue[: len(images)])
        if self.change == "roll":
            self.queue = self.queue.roll(-5, 0)
        elif self.change == "flip":
            self.queue = self.queue.flip(0)
        else:
            self.queue = self.queue[torch.randperm(NUM_ROWS)]
        return outputs

    def extra(self) -> object:
        return self.queue


def main() -> None:
    args = arguments("case")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:112], dtype=torch.float32).flatten(1) / 16
    loader = DataLoader(
        TensorDataset(images, torch.tensor(digits.target[:112])), batch_size=16, shuffle=True
    )
    model = Annealed() if args.case == "anneal" else Queue(args.case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(
        args.directory, model=model, optimizer=optimizer, save_every=3, strict=args.strict
    )
    for epoch in ckpt.epochs(2):
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = epoch * len(loader) + index + 1
            state = {"extra": model.extra()}
            record(step, loss=loss, optimizers=optimizer, inputs=inputs, state=state)
            ckpt.step(loss=loss)


if __name__ == "__main__":
    main()
