import signal

from parts import objects, step_of

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects()
train_on = step_of(model, optimizer, number=signal.SIGUSR1)
...  # fragment 2
for batch in ckpt.batches(loader, epochs=3):
    train_on(batch)
