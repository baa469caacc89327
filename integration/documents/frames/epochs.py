"""Stopped in the second epoch; ``results.json`` is written by the launch that ends the run."""

import json
import os

import torch
from parts import LAUNCH, objects, record, step_of

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects()
train_on = step_of(model, optimizer, after=20)


def evaluate(model: torch.nn.Module) -> float:
    return float(model.state_dict()["0.weight"].sum())


ckpt = Checkpointer("runs/a", model=model, optimizer=optimizer)
...  # fragment 1
...  # fragment 3
assert ckpt.already_finished == (LAUNCH == 3)
if LAUNCH < 3:
    with open("results.json") as file:
        record(json.load(file)["loss"])
    os.remove("results.json")
assert not os.path.exists("results.json")
