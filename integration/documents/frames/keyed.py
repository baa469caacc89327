import torch
from parts import LAUNCH, objects, step_of
from torch.utils.data import DataLoader, Dataset

from resumekit.adapters.torch import Checkpointer


class Noisy(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.randn(8) + index / 64,)


model, optimizer, _ = objects()
num_workers = {0: 0, 1: 2, 2: 1}[LAUNCH]  # exact all the same
loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=num_workers)
train_on = step_of(model, optimizer)
...  # fragment 1
for batch in ckpt.batches(loader, epochs=3):
    train_on(batch)
