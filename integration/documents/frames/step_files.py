import torch
from parts import objects, step_of

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects(num_batches=250)
train_on = step_of(model, optimizer)
for batch in Checkpointer("runs/a", model=model, optimizer=optimizer).batches(loader, epochs=2):
    train_on(batch)
...  # fragment 1
expected = model.state_dict()
assert weights.keys() == expected.keys()
assert all(torch.equal(weights[name], value) for name, value in expected.items())
