"""Optimizers that train parameters outside of the model, with plain PyTorch.

``--case temperature``: a parameter beside the model's; ``--case list``: layers in a Python list;
``--case criterion``: a loss module with weights of its own. ``--optimizer sgd`` has no moments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from judged_script import arguments, record
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

Parameters = list[nn.Parameter]


class Stack(nn.Module):
    """Hidden layers that no ``state_dict`` contains."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(64, 16), nn.Linear(16, 16)]
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for layer in self.hidden:
            images = torch.relu(layer(images))
        return self.head(images)


class Prototypes(nn.Module):
    """A loss with a trained prototype of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(10, 8))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(-torch.cdist(features, self.prototypes), labels)


def make(case: str) -> tuple[nn.Module, Parameters, Callable[[Any, Any], torch.Tensor]]:
    """The model, what is trained outside of its ``state_dict``, and the loss of a batch."""
    if case == "temperature":
        temperature = nn.Parameter(torch.ones(()))
        linear = nn.Linear(64, 10)
        return (
            linear,
            [temperature],
            lambda x, y: nn.functional.cross_entropy(linear(x) / temperature, y),
        )
    if case == "list":
        stack = Stack()
        hidden = [parameter for layer in stack.hidden for parameter in layer.parameters()]
        return stack, hidden, lambda x, y: nn.functional.cross_entropy(stack(x), y)
    encoder, criterion = nn.Linear(64, 8), Prototypes()
    return encoder, [*criterion.parameters()], lambda x, y: criterion(encoder(x), y)


def main() -> None:
    args = arguments("case", "optimizer")
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:112], dtype=torch.float32).flatten(1) / 16
    loader = DataLoader(
        TensorDataset(images, torch.tensor(digits.target[:112])), batch_size=16, shuffle=True
    )
    model, others, loss_of = make(args.case)
    kind = torch.optim.SGD if args.optimizer == "sgd" else torch.optim.AdamW
    optimizer = kind([*model.parameters(), *others], lr=5e-2)
    ckpt = Checkpointer(
        args.directory, model=model, optimizer=optimizer, save_every=3, strict=args.strict
    )
    for epoch in ckpt.epochs(2):
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = loss_of(inputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record(
                epoch * len(loader) + index + 1,
                loss=loss,
                optimizers=optimizer,
                inputs=inputs,
                state={"others": others},
            )
            ckpt.step(loss=loss)


if __name__ == "__main__":
    main()
