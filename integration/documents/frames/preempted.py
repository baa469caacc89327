from parts import objects, step_of

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
for batch in ():  # fragment 1
    train_on(batch)
