"""520 steps of a Trainer, without a line of resumekit."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

torch.manual_seed(0)
ids = torch.arange(8)
settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        "output", max_steps=520, save_steps=500, per_device_train_batch_size=2, **settings
    ),
    train_dataset=[{"input_ids": ids.roll(each), "labels": ids} for each in range(8)],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint("output"))
