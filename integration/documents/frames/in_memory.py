import signal
import time

from parts import objects, step_of

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects(num_batches=100)
train_on = step_of(model, optimizer, after=250, number=signal.SIGKILL)
...  # fragment 3
for batch in ckpt.batches(loader, epochs=3):
    train_on(batch)
    time.sleep(0.005)
