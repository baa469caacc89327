"""Stopped, and continued where the disk is empty."""

import shutil

from parts import LAUNCH, objects, step_of

from resumekit.adapters.torch import Checkpointer

if LAUNCH == 2:
    shutil.rmtree("runs")
model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
...  # fragment 1
for batch in ckpt.batches(loader, epochs=3):
    train_on(batch)
