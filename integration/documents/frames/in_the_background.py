from parts import objects, step_of

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
...  # fragment 3
for batch in ckpt.batches(loader, epochs=3):
    train_on(batch)
