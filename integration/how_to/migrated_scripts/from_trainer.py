"""A stock training with the Trainer, which the test of the page "Migrate" changes as it says."""

import os

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.criterion = nn.MSELoss()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.criterion(self.layers(inputs)[:, 0], labels)}


class Sums(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(1600, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index].sum()}


set_seed(0)
arguments = TrainingArguments(
    output_dir="output",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    save_steps=500,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
os.makedirs(arguments.output_dir, exist_ok=True)
trainer = Trainer(Regression(), arguments, train_dataset=Sums())
last = get_last_checkpoint(arguments.output_dir)
trainer.train(resume_from_checkpoint=last)
