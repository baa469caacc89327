"""A session whose time is over at once, and the next one, which has lost the disk."""

import os
import shutil
import time

from parts import LAUNCH, objects, step_of

from resumekit.adapters.torch import Checkpointer

SESSION_SECONDS = 0.0 if LAUNCH == 1 else 3600.0
mirror = os.path.abspath("mirror")
if LAUNCH == 2:
    shutil.rmtree("runs")
model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
...  # fragment 1
assert os.listdir(mirror)
