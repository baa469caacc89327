"""Stopped, and continued where the disk is empty and one of the places is."""

import os
import shutil

from parts import LAUNCH, objects, step_of

from resumekit.adapters.torch import Checkpointer

if LAUNCH == 2:
    assert os.listdir("disk2/runs/a")
    shutil.rmtree("disk2")
    shutil.rmtree("runs")
model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
...  # fragment 2
ckpt = Checkpointer("runs/a", model=model, optimizer=optimizer, places=places)
for batch in ckpt.batches(loader, epochs=3):
    train_on(batch)
