"""An early-stopping object of the module, with Accelerate; ``--bare`` passes it to nothing."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from judged_script import arguments, record
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.accelerate import Checkpointer


class EarlyStopping:
    """Says when the loss has not fallen for a while."""

    def __init__(self, max_checks: int) -> None:
        self.max_checks = max_checks
        self.count = 0
        self.lowest = float("inf")

    def check(self, loss: float) -> bool:
        if loss < self.lowest:
            self.lowest, self.count = loss, 0
        else:
            self.count += 1
        return self.count >= self.max_checks


stopper = EarlyStopping(max_checks=9)


def train(args: Any) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:160], dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target[:160]))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    extras = None if args.bare else vars(stopper)
    ckpt = Checkpointer(
        accelerator,
        args.directory,
        extras=extras,
        save_every=3,
        strict=args.strict,
        loop_variables=args.loop_variables,
    )
    for epoch in ckpt.epochs(3):
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            stop = stopper.check(loss.item())
            state = {"stopper": stopper, "stop": stop}
            step = epoch * len(loader) + index + 1
            record(step, loss=loss, optimizers=optimizer, inputs=inputs, state=state)
            ckpt.step(loss=loss)
            if stop:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                return


if __name__ == "__main__":
    train(arguments())
