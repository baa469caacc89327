"""Stopped at step 500; a fork of it continues with another learning rate."""

import os
import subprocess
import sys

from parts import LAUNCH, objects, record, step_of

from resumekit.adapters.torch import Checkpointer

if LAUNCH == 2:
    command = [sys.executable, "-m", "resumekit", "fork", "runs/a/step-00000500", "runs/b"]
    subprocess.run(command, check=True)
model, optimizer, loader = objects(num_batches=200)
train_on = step_of(model, optimizer, after=500)
run = "runs/b" if os.path.exists("runs/b") else "runs/a"
ckpt = Checkpointer(run, model=model, optimizer=optimizer)
for batch in ():  # fragment 1
    train_on(batch)
record(optimizer.param_groups[0]["lr"])
assert optimizer.param_groups[0]["lr"] == 2e-3
