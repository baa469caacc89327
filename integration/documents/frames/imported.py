"""A Trainer alone is killed after its checkpoint of step 500, and resumekit continues from it."""

import signal

import torch
from parts import LAUNCH
from trainer_parts import Net, Recorder
from transformers import Trainer, TrainingArguments

from resumekit.adapters.transformers import ResumeCallback

torch.manual_seed(0)
settings = {"logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
trainer = Trainer(
    Net(),
    TrainingArguments("output", max_steps=520, save_steps=500, **settings),
    train_dataset=[{"x": torch.randn(8)} for _ in range(640)],
    callbacks=[Recorder(after=505, number=signal.SIGKILL)],
)
if LAUNCH < 2:
    trainer.train()
else:
    ...  # fragment 1
