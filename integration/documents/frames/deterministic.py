import torch
from parts import objects, step_of

from resumekit.adapters.torch import Checkpointer

...  # fragment 1
assert torch.are_deterministic_algorithms_enabled()
assert not torch.is_deterministic_algorithms_warn_only_enabled()
model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
for batch in Checkpointer("runs/a", model=model, optimizer=optimizer).batches(loader, epochs=3):
    train_on(batch)
