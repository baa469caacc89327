import torch
from parts import objects, record, stop_first_launch
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

model, optimizer, _ = objects()
a, b = TensorDataset(torch.randn(128, 8)), TensorDataset(torch.randn(480, 8))


def train_on(labeled: list[torch.Tensor], unlabeled: list[torch.Tensor]) -> torch.Tensor:
    x = torch.cat([labeled[0], unlabeled[0]])
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(loss)
    stop_first_launch()
    return loss


ckpt = Checkpointer("runs/a", model=model, optimizer=optimizer)
...  # fragment 5
