import torch
from parts import objects, step_of
from safetensors.torch import load_file

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects()
train_on = step_of(model, optimizer)
losses = iter([3.0, 1.0, 2.0])


def evaluate(model: torch.nn.Module) -> float:
    loss = next(losses)
    if loss == 1.0:
        weights.update((name, value.clone()) for name, value in model.state_dict().items())
    return loss


weights: dict[str, torch.Tensor] = {}
...  # fragment 1.1
for epoch in ckpt.epochs(3):
    for batch in ckpt.batches(loader):
        train_on(batch)
    ...  # fragment 1.3
assert not torch.equal(model.state_dict()["0.weight"], weights["0.weight"])
...  # fragment 2
assert best.step == 32
assert best.value == 1.0
assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
