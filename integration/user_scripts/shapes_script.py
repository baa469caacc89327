"""A script whose loop and all of its state are at module level.

Every value decides the next loss: a float, a list, an array, a hidden state, a global that a
function changes, a function with a default argument, a closure, an object and its class.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "live" / "shapes"))

from tiny_training import EPOCHS, append, begin_script, loss_of, make, step

from resumekit.adapters.torch import Checkpointer

given = begin_script()
total = 0.0


def add_to_total(loss: float) -> None:
    global total
    total = 0.8 * total + loss


def count(loss: float, seen: list[float] = []) -> float:  # noqa: B006 - the list is state
    seen.append(loss)
    return len(seen) / 21


def make_average():
    average = 1.0

    def update(loss: float) -> float:
        nonlocal average
        average = 0.7 * average + 0.3 * loss
        return average

    return update


class Curriculum:
    num_changes = 0

    def __init__(self) -> None:
        self.level = 0.3

    def update(self, loss: float) -> None:
        if loss < 1.0:
            self.level += 0.1
            Curriculum.num_changes += 1

    def factor(self) -> float:
        return self.level + Curriculum.num_changes / 21


model, optimizer, loader = make()
target = {name: value.detach().clone() for name, value in model.named_parameters()}
curriculum, average = Curriculum(), make_average()
scale, history, losses = 1.0, deque(maxlen=3), np.zeros(4)
hidden = torch.zeros(4, 4)
ckpt = Checkpointer(given["directory"], model=model, optimizer=optimizer, **given["options"])
for _ in ckpt.epochs(EPOCHS):
    for inputs, targets in ckpt.batches(loader):
        hidden = torch.tanh(inputs + hidden.roll(1, 0)).detach()
        factors = [scale, sum(history) / 3, losses[1:].mean(), curriculum.factor(), total / 5]
        loss = loss_of(model, (inputs + hidden / 5, targets)) * (0.2 + sum(factors) / 5)
        loss = loss + sum((p - target[n]).square().sum() for n, p in model.named_parameters())
        loss = loss * (0.5 + count(loss.item()) / 2) * (0.5 + average(loss.item()) / 4)
        step(ckpt, optimizer, loss)
        scale = 0.7 * scale + 0.2 * loss.item()
        history.append(loss.item())
        losses[:] = np.roll(losses, 1)
        losses[0] = loss.item()
        add_to_total(loss.item())
        curriculum.update(loss.item())
        for name, parameter in model.named_parameters():
            target[name].lerp_(parameter.detach(), 0.2)
        given["record"](loss, model)
append(given["path"], end="finished")
