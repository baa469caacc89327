"""A Trainer alone is killed after its checkpoint of step 500, and resumekit continues from it."""

import signal

import torch
from parts import LAUNCH, record, stop_first_launch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from resumekit.adapters.transformers import ResumeCallback


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - x).square().mean()}


class Recorder(TrainerCallback):
    def on_log(self, args, state, control, logs, **objects) -> None:
        if "loss" in logs:
            record(logs["loss"])
            stop_first_launch(after=505, number=signal.SIGKILL)


torch.manual_seed(0)
settings = {"logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
trainer = Trainer(
    Net(),
    TrainingArguments("output", max_steps=520, save_steps=500, **settings),
    train_dataset=[{"x": torch.randn(8)} for _ in range(640)],
    callbacks=[Recorder()],
)
if LAUNCH < 2:
    trainer.train()
else:
    ...  # fragment 1
