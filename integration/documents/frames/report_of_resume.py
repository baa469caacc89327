from parts import LAUNCH, objects, step_of

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
ckpt = Checkpointer("runs/a", model=model, optimizer=optimizer)
...  # fragment 1
assert report.resumed == (LAUNCH == 2)
assert report.step == (10 if LAUNCH == 2 else 0)
for batch in ckpt.batches(loader, epochs=3):
    train_on(batch)
