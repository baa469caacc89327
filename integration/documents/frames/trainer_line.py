import torch
from trainer_parts import Net, Recorder
from transformers import Trainer, TrainingArguments

from resumekit.adapters.transformers import ResumeCallback

torch.manual_seed(0)
settings = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True}
trainer = Trainer(
    Net(),
    TrainingArguments("output", num_train_epochs=3, **settings),
    train_dataset=[{"x": torch.randn(8)} for _ in range(64)],
    callbacks=[Recorder()],
)
...  # fragment 2.1
trainer.train()
